-- _prefix: which prefixes of prompts a node is thought to hold in its KV cache; after _work, in a
-- pool that follows them.
--
-- A request comes with the chain of its blocks, 'hash tokens hash tokens ...', the tokens being those
-- of the prompt up to the end of the block. Of each node the set `cached` of its blocks, by when
-- they were last asked for: what was so longest ago is forgotten when all of them are more than
-- the node can hold, as its engine does. The hash `prefix` is the other way round: block -> its tokens
-- and the nodes that hold it, a blank behind each.

local prefix_key = ARGV[2] .. 'prefix'

local function chain_of(text)
  local hashes, upto = {}, {}
  for hash, tokens in string.gmatch(text, '(%x+) (%d+)') do
    hashes[#hashes + 1], upto[#upto + 1] = hash, tonumber(tokens)
  end
  return {hashes = hashes, upto = upto, holders = {}}
end

-- Node -> tokens of the longest prefix that it holds, and these nodes in a list, deepest first.
local function hits_of(chain)
  local hits, nodes = {}, {}
  if #chain.hashes == 0 then return hits, nodes end
  chain.holders = redis.call('HMGET', prefix_key, unpack(chain.hashes))
  for i = 1, #chain.hashes do
    if not chain.holders[i] then break end
    for node in string.gmatch(chain.holders[i], ' (%S+)%f[ ]') do
      if i == 1 or hits[node] == chain.upto[i - 1] then hits[node] = chain.upto[i] end
    end
  end
  for node in pairs(hits) do nodes[#nodes + 1] = node end
  table.sort(nodes, function(a, b) return hits[a] > hits[b] or (hits[a] == hits[b] and a < b) end)
  return hits, nodes
end

-- Take a node out of a block's holders; returns the block's tokens.
local function leave_block(id, hash)
  local holders = redis.call('HGET', prefix_key, hash)
  local at, last = string.find(holders or '', ' ' .. id .. ' ', 1, true)
  if not at then return 0 end
  local rest = string.sub(holders, 1, at) .. string.sub(holders, last + 1)
  if string.find(rest, '^%d+ $') then
    redis.call('HDEL', prefix_key, hash)
  else
    redis.call('HSET', prefix_key, hash, rest)
  end
  return tonumber(string.match(holders, '^%d+'))
end

-- The node will hold the chain. Of one moment the later blocks are forgotten first: a prefix without
-- its beginning is worth nothing.
local function hold(id, chain, row, now)
  if #chain.hashes == 0 then return end
  local cached_key, used, named = ARGV[2] .. 'cached:' .. id, {}, {}
  for i, hash in ipairs(chain.hashes) do
    used[#used + 1], used[#used + 2] = string.format('%.3f', now - i / 128), hash
    local holders = chain.holders[i] or chain.upto[i] - (chain.upto[i - 1] or 0) .. ' '
    if not string.find(holders, ' ' .. id .. ' ', 1, true) then
      named[#named + 1], named[#named + 2] = hash, holders .. id .. ' '
      row[CACHED] = row[CACHED] + tonumber(string.match(holders, '^%d+'))
    end
  end
  redis.call('ZADD', cached_key, unpack(used))
  if #named > 0 then redis.call('HSET', prefix_key, unpack(named)) end
  local room = row[KV_TOKENS] > 0 and row[KV_TOKENS] or NODE_TOKENS
  for _ = 1, 256 do -- bounded: what is left over leaves with later calls
    if row[CACHED] <= room then break end
    local oldest = redis.call('ZPOPMIN', cached_key)[1]
    row[CACHED] = oldest and math.max(0, row[CACHED] - leave_block(id, oldest)) or 0
  end
end

-- The node holds nothing any more: it has started anew, or goes. Others that hold the same blocks
-- show it again with their next request.
local function lose(id)
  local cached_key = ARGV[2] .. 'cached:' .. id
  local hashes = redis.call('ZRANGE', cached_key, 0, -1)
  for from = 1, #hashes, 500 do
    redis.call('HDEL', prefix_key, unpack(hashes, from, math.min(from + 499, #hashes)))
  end
  redis.call('DEL', cached_key)
end

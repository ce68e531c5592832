-- _node: the record of a node and its score. Prepended to every verb (see app/cluster/scripts.py):
-- one place computes a score, so every verb leaves the same number behind.
--
-- Every verb gets: ARGV[1] now ms ('' = the server's own clock), ARGV[2] scoring (JSON),
-- ARGV[3] prefix ('lw:{pool}:'). Keys of a node and of its models are built from the prefix:
-- same hash tag, same slot.

local prefix = ARGV[3]
local scoring = cjson.decode(ARGV[2])

local function clock()
  if ARGV[1] ~= '' then return tonumber(ARGV[1]) end
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end
local now = clock()

local FIELDS = {'weight', 'capacity', 'state', 'health', 'circuit', 'cooling_until_ms', 'sum_us',
  'samples', 'last_sample_ms', 'models', 'epoch', 'streak', 'opens', 'tripped_at_ms', 'trial',
  'ewma_us', 'picked', 'decode_tokens', 'decode_us'}

-- The record of a node as a table, or nil. Absent fields take their neutral value.
local function read(id)
  local v = redis.call('HMGET', prefix .. 'node:' .. id, unpack(FIELDS))
  if not v[10] then return nil end
  local function num(i) return tonumber(v[i] or '') or 0 end
  return {
    id = id, key = prefix .. 'node:' .. id, weight = num(1), capacity = num(2),
    state = v[3] or 'active', health = v[4] or 'ok', circuit = v[5] or 'closed',
    cooling_until_ms = num(6), sum_us = num(7), samples = num(8), last_sample_ms = num(9),
    models = v[10], epoch = num(11), streak = num(12), opens = num(13), tripped_at_ms = num(14),
    trial = v[15] or '', ewma_us = num(16), picked = num(17),
    decode_tokens = num(18), decode_us = num(19),
  }
end

-- In flight, never below zero: a counter damaged from outside must not make a node win.
local function active(id)
  local n = tonumber(redis.call('GET', prefix .. 'active:' .. id) or '') or 0
  return n > 0 and n or 0
end

local function usable(node, n)
  return node.state == 'active' and node.health == 'ok' and node.circuit == 'closed'
    and node.cooling_until_ms <= now and n < node.capacity
end

-- T of the classic formula, ms: the mean of the window, the prior when it is empty or too old.
local function ttft_ms(node)
  if node.samples == 0 or now - node.last_sample_ms > scoring.sample_max_age_ms then
    return scoring.prior_ms
  end
  local mean = node.sum_us / node.samples / 1000
  return mean > scoring.floor_ms and mean or scoring.floor_ms
end

-- One function per policy: (node, in flight) -> score. Highest wins; p2c and peak_ewma choose
-- the better of two drawn by chance, the others take the best (ties are drawn by chance).
local POLICY = {
  ttft = function(node, n)
    local slow = scoring.alpha * ttft_ms(node) / scoring.baseline_ms + (1 - scoring.alpha)
    return node.weight / ((n + 1) * slow)
  end,
  random = function() return 1 end,
  round_robin = function(node) return 1 / (1 + node.picked) end,
  least_conn = function(_, n) return 1 / (n + 1) end,
  weighted_least_conn = function(node, n) return node.weight / (n + 1) end,
  p2c = function(_, n) return 1 / (n + 1) end,
  peak_ewma = function(node, n)
    local ms = node.ewma_us > 0 and node.ewma_us / 1000 or scoring.prior_ms
    return 1000 / ((n + 1) * ms)
  end,
}

local function score(node, n)
  if not usable(node, n) then return 0 end
  return POLICY[scoring.policy](node, n)
end

-- Write the node's live score into the set of every model that it serves.
local function rescore(node, n)
  local s = score(node, n)
  for model in string.gmatch(node.models, '[^\n]+') do
    redis.call('ZADD', prefix .. 'score:' .. model, s, node.id)
  end
  return s
end

-- When a node that is open or cooling may be looked at again; nil takes it off the list.
local function due(node, at_ms)
  for model in string.gmatch(node.models, '[^\n]+') do
    local key = prefix .. 'due:' .. model
    if at_ms then redis.call('ZADD', key, at_ms, node.id) else redis.call('ZREM', key, node.id) end
  end
end

-- A removed node that carries nothing more leaves no key behind.
local function forget(node)
  redis.call('DEL', node.key, prefix .. 'active:' .. node.id, prefix .. 'ttft:' .. node.id)
end

-- _node: the record of a node and its score; in front of every verb (see app/cluster/scripts.py,
-- which also writes the constants above this line: POLICY, ALPHA, BASELINE_MS ...).
--
-- score = base / (C + 1): `base` is the score of the node when idle, 0 while it is not usable.
-- It is kept in the record and changes only with a sample, the circuit, or the operator's hand,
-- so that a request reads a few fields and computes one division. For policy `work` it says only
-- whether the node is usable: the score is that of its row (_work).
--
-- ARGV[1] is the time in ms ('' = the server's clock), ARGV[2] the prefix of the pool's keys:
-- keys of a chosen node and of its models are built from it (same hash tag, same slot).

local prefix = ARGV[2]

-- Arguments are checked before the first write: a script that fails half way leaves its writes.
local function demand(good, i)
  if not good then error({err = 'LEASEWAY bad ARGV[' .. i .. ']: ' .. tostring(ARGV[i])}) end
end

local function whole(from, to)
  for i = from, to do demand(string.find(ARGV[i] or '', '^%d+$'), i) end
end

local time
local function clock()
  if ARGV[1] ~= '' then return tonumber(ARGV[1]) end
  if not time then
    local t = redis.call('TIME')
    time = t[1] * 1000 + math.floor(t[2] / 1000)
  end
  return time
end

-- Write the live score of a node with n leases in flight into the set of each of its models.
-- `row` is that of policy `work`, when the caller has just remembered it.
local function put(id, base, capacity, models, n, row)
  local score = n < capacity and base or 0
  if POLICY == 'work' then
    if not row then
      row = row_of(id, clock())
      remember(id, row, clock())
    end
    if score > 0 then score = blind_score(row) end
  elseif BY_LOAD then
    score = score / (n + 1)
  end
  if not string.find(models, '\n', 1, true) then
    if models ~= '' then redis.call('ZADD', prefix .. 'score:' .. models, score, id) end
    return
  end
  for model in string.gmatch(models, '[^\n]+') do
    redis.call('ZADD', prefix .. 'score:' .. model, score, id)
  end
end

-- Leases in flight, never below zero: a counter damaged from outside must not make a node win.
local function active(id)
  return math.max(0, tonumber(redis.call('GET', prefix .. 'active:' .. id) or '') or 0)
end

-- The whole record as a table, or nil. What looks like a number is one, but for the names of models
-- and of the trial (a lease id like 1234567e-3 is none); an absent field is 0.
local function read(id)
  local key = prefix .. 'node:' .. id
  local flat, node = redis.call('HGETALL', key), setmetatable({}, {__index = function() return 0 end})
  for i = 1, #flat, 2 do
    local field, value = flat[i], flat[i + 1]
    node[field] = field ~= 'models' and field ~= 'trial' and tonumber(value) or value
  end
  if node.models == 0 then return nil end
  node.id, node.key = id, key
  return node
end

-- T of the classic formula, ms: the mean of the window, the prior when that is empty or too old.
-- A node without samples for a while decays toward the best it has been, so that one bad window
-- does not starve it for ever; a node that keeps a request waiting is as slow as that wait.
local function ttft_ms(node, now)
  local t, age = PRIOR_MS, now - node.last_sample_ms
  if node.samples > 0 and age <= SAMPLE_MAX_AGE_MS then
    t = node.sum_us / node.samples / 1000
    if age > IDLE_AFTER_MS and node.best_us > 0 then
      local best = node.best_us / 1000
      t = best + (t - best) * math.exp(-(age - IDLE_AFTER_MS) / IDLE_AFTER_MS)
    end
  end
  if node.waiting_until_ms > now then t = math.max(t, node.waiting_ms) end
  return math.max(t, FLOOR_MS)
end

-- The score of the idle node, from its whole record.
local function base_of(node, now)
  if node.state ~= 'active' or node.health ~= 'ok' or node.circuit ~= 'closed'
    or node.cooling_until_ms > now then
    return 0
  elseif POLICY == 'ttft' then
    local base = node.weight / (ALPHA * ttft_ms(node, now) / BASELINE_MS + 1 - ALPHA)
    local up_ms = now - node.since_ms -- slow start: the first requests warm a cold node up
    if up_ms < 0 or up_ms >= SLOW_START_MS then return base end -- below 0: the clock went back
    return base * math.max(0.1, up_ms / SLOW_START_MS)
  elseif POLICY == 'weighted_least_conn' then
    return node.weight
  elseif POLICY == 'peak_ewma' then
    return 1000 / (node.ewma_us > 0 and node.ewma_us / 1000 or PRIOR_MS)
  elseif POLICY == 'round_robin' then
    return 1 / (1 + node.picked)
  end
  return 1 -- least_conn and p2c divide it by load, random does not, work has a row
end

-- Write what changed of a record, its base and its live score.
local function keep(node, n, now, ...)
  local base = base_of(node, now)
  redis.call('HSET', node.key, 'base', string.format('%.17g', base), ...)
  put(node.id, base, node.capacity, node.models, n, node.row ~= 0 and node.row or nil)
end

-- When a node that is open or cooling may be looked at again; nil takes it off the list.
local function due(node, at_ms)
  for model in string.gmatch(node.models, '[^\n]+') do
    local key = prefix .. 'due:' .. model
    if at_ms then redis.call('ZADD', key, at_ms, node.id) else redis.call('ZREM', key, node.id) end
  end
end

-- Policy `work`: the limits of the node's engine, as the operator or else the engine itself says.
local function limits_of(node)
  local row = node.row
  row[SLOTS] = (tonumber(node.slots) or 0) > 0 and node.slots or node.engine_slots
  row[KV_TOKENS] = (tonumber(node.kv_tokens) or 0) > 0 and node.kv_tokens or node.engine_kv_tokens
  row[KV_USED] = node.signal_until_ms > clock() and tonumber(node.kv_used) or 0
end

-- The record of a lease as `grant` wrote it: 'node epoch start_ms prompt_tokens', and from policy `work`
-- ' fresh_tokens ahead_tokens held_tokens'; a '+' behind it once the lease has had its first token.
local function parse(id, text)
  local node, epoch, start, size, more, heard =
    string.match(text, '^(%S+) (%d+) (%d+) (%d+)([^+]*)(%+?)$')
  local fresh, ahead, held = string.match(more, '^ (%S+) (%S+) (%S+)$')
  return {id = id, node = node, epoch = epoch, start_ms = tonumber(start), size = size,
    fresh = tonumber(fresh or size), ahead = tonumber(ahead or ''),
    held = tonumber(held or size), heard = heard == '+'}
end

-- A removed node that carries nothing more leaves no key behind.
local function forget(id)
  redis.call('DEL', prefix .. 'node:' .. id, prefix .. 'active:' .. id, prefix .. 'ttft:' .. id)
  redis.call('HDEL', prefix .. 'work', id)
end

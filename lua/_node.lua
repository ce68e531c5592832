-- _node: the record of a node and its score; in front of every verb (see app/cluster/scripts.py,
-- which also writes the constants above this line: POLICY, ALPHA, BASELINE_MS ...).
--
-- score = base / (C + 1): `base` is the score of the node when idle, 0 while it is not usable.
-- It is kept in the record and changes only with a sample, the circuit, or the operator's hand,
-- so that a request reads a few fields and computes one division.
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

local function clock()
  if ARGV[1] ~= '' then return tonumber(ARGV[1]) end
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

-- Write the live score of a node with n leases in flight into the set of each of its models.
local function put(id, base, capacity, models, n)
  local score = n < capacity and base or 0
  if BY_LOAD then score = score / (n + 1) end
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

-- The whole record as a table, or nil. Absent fields take their neutral value.
local function read(id)
  local key = prefix .. 'node:' .. id
  local v = redis.call('HMGET', key, 'models', 'state', 'health', 'circuit', 'trial', 'weight',
    'capacity', 'cooling_until_ms', 'sum_us', 'samples', 'last_sample_ms', 'epoch', 'streak',
    'opens', 'tripped_at_ms', 'ewma_us', 'picked')
  if not v[1] then return nil end
  for i = 6, 17 do v[i] = tonumber(v[i] or '') or 0 end
  return {id = id, key = key, models = v[1], state = v[2], health = v[3], circuit = v[4],
    trial = v[5] or '', weight = v[6], capacity = v[7], cooling_until_ms = v[8], sum_us = v[9],
    samples = v[10], last_sample_ms = v[11], epoch = v[12], streak = v[13], opens = v[14],
    tripped_at_ms = v[15], ewma_us = v[16], picked = v[17]}
end

-- The score of the idle node, from its whole record.
local function base_of(node, now)
  if node.state ~= 'active' or node.health ~= 'ok' or node.circuit ~= 'closed'
    or node.cooling_until_ms > now then
    return 0
  elseif POLICY == 'ttft' then
    local t = PRIOR_MS
    if node.samples > 0 and now - node.last_sample_ms <= SAMPLE_MAX_AGE_MS then
      t = math.max(node.sum_us / node.samples / 1000, FLOOR_MS)
    end
    return node.weight / (ALPHA * t / BASELINE_MS + 1 - ALPHA)
  elseif POLICY == 'weighted_least_conn' then
    return node.weight
  elseif POLICY == 'peak_ewma' then
    return 1000 / (node.ewma_us > 0 and node.ewma_us / 1000 or PRIOR_MS)
  elseif POLICY == 'round_robin' then
    return 1 / (1 + node.picked)
  end
  return 1 -- least_conn and p2c divide it by load, random does not
end

-- Write what changed of a record, its base and its live score.
local function keep(node, n, now, ...)
  local base = base_of(node, now)
  redis.call('HSET', node.key, 'base', string.format('%.17g', base), ...)
  put(node.id, base, node.capacity, node.models, n)
end

-- When a node that is open or cooling may be looked at again; nil takes it off the list.
local function due(node, at_ms)
  for model in string.gmatch(node.models, '[^\n]+') do
    local key = prefix .. 'due:' .. model
    if at_ms then redis.call('ZADD', key, at_ms, node.id) else redis.call('ZREM', key, node.id) end
  end
end

-- A removed node that carries nothing more leaves no key behind.
local function forget(id)
  redis.call('DEL', prefix .. 'node:' .. id, prefix .. 'active:' .. id, prefix .. 'ttft:' .. id)
end

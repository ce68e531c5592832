#!lua _node
-- register: put a node into the registry or change what the operator sets of it. What the
-- fleet has learned of it (window, circuit, in-flight count) is never reset by a replica
-- that starts; a node added anew after removal begins a new epoch with an empty window.
--
-- KEYS[1] nodes     set   node ids
-- KEYS[2] node      hash  the record
-- ARGV[1] now       ms; '' = the server's clock
-- ARGV[2] prefix    of the pool's keys
-- ARGV[3] id        of the node
-- ARGV[4] models    names, one a line
-- ARGV[5] health    of a node that is added: 'new' waits for its first good probe, 'ok' does not
-- ARGV[6...]        pairs: field, value (url, weight, capacity, engine, api_key_env, source, state)
--
-- Returns {'added' | 'changed' | 'same', epoch}.

demand(string.find(ARGV[3], '^%S+$'), 3)
demand(ARGV[5] == 'new' or ARGV[5] == 'ok', 5)
demand(#ARGV % 2 == 1, #ARGV)
local id, models, now = ARGV[3], ARGV[4], clock()
local old, at = read(id), nil -- at: when an open or cooling node was to be looked at again
local said, epoch = 'same', old and old.epoch or 0
if not old or old.state == 'removed' then
  said, epoch = 'added', math.max(now, epoch + 1)
  redis.call('DEL', KEYS[2], prefix .. 'ttft:' .. id)
  -- First the fields that every request reads: a small hash is searched from its beginning.
  redis.call('HSET', KEYS[2], 'base', 0, 'capacity', 0, 'models', models,
    'epoch', string.format('%d', epoch), 'bad', '0.0000', 'state', 'active', 'tpot_us', '',
    'health', ARGV[5], 'circuit', 'closed', 'streak', 0, 'since_ms', now)
  redis.call('SETNX', prefix .. 'active:' .. id, 0)
  redis.call('ZADD', prefix .. 'probes', now, id)
  redis.call('ZADD', prefix .. 'sweeps', now, id)
elseif old.models ~= models then
  said = 'changed'
  for model in string.gmatch(old.models, '[^\n]+') do
    at = at or redis.call('ZSCORE', prefix .. 'due:' .. model, id)
    redis.call('ZREM', prefix .. 'score:' .. model, id)
  end
  due(old, nil)
end
redis.call('SADD', KEYS[1], id)
for i = 6, #ARGV, 2 do
  if redis.call('HGET', KEYS[2], ARGV[i]) ~= ARGV[i + 1] then
    redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1])
    if said == 'same' then said = 'changed' end
  end
end
redis.call('HSET', KEYS[2], 'models', models)
local node = read(id)
if PREFIX and said == 'added' then lose(id) end
if POLICY == 'work' then
  redis.call('ZADD', prefix .. 'weights', node.weight, id)
  node.row = said == 'added' and new_row(node.weight, active(id), now) or row_of(id, now)
  if node.row[BEST_RATE] == 0 then prior(node.row, node.weight) end
  limits_of(node)
  remember(id, node.row, now)
end
if old and old.models ~= models and (node.circuit ~= 'closed' or node.cooling_until_ms > now) then
  due(node, at or math.max(now, node.cooling_until_ms))
end
keep(node, active(id), now)
return {said, string.format('%d', epoch)}

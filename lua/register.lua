#!lua
-- register: put a node into the registry or change what the operator sets of it. What the
-- fleet has learned of it (window, circuit, in-flight count) is never reset by a replica
-- that starts; a node added anew after removal begins a new epoch with an empty window.
--
-- KEYS[1] nodes     set   node ids
-- KEYS[2] node      hash  the record
-- ARGV[1] now       ms; '' = the server's clock
-- ARGV[2] scoring   JSON: policy and constants
-- ARGV[3] prefix    of the pool's keys
-- ARGV[4] id        of the node
-- ARGV[5] models    names, one a line
-- ARGV[6...]        pairs: field, value (url, weight, capacity, engine, api_key_env, source, state)
--
-- Returns {'added' | 'changed' | 'same', epoch}.

local id, models = ARGV[4], ARGV[5]
local old = read(id)
local said, epoch = 'same', old and old.epoch or 0
if not old or old.state == 'removed' then
  said, epoch = 'added', math.max(now, epoch + 1)
  redis.call('DEL', KEYS[2], prefix .. 'ttft:' .. id)
  redis.call('HSET', KEYS[2], 'state', 'active', 'health', 'ok', 'circuit', 'closed', 'epoch', epoch)
  redis.call('SADD', KEYS[1], id)
elseif redis.call('SADD', KEYS[1], id) == 1 then
  said = 'changed'
end
if old and old.models ~= models then
  due(old, nil)
  for model in string.gmatch(old.models, '[^\n]+') do redis.call('ZREM', prefix .. 'score:' .. model, id) end
  said = said == 'same' and 'changed' or said
end
for i = 6, #ARGV, 2 do
  if redis.call('HGET', KEYS[2], ARGV[i]) ~= ARGV[i + 1] then
    redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1])
    said = said == 'same' and 'changed' or said
  end
end
redis.call('HSET', KEYS[2], 'models', models)
local node = read(id)
if node.circuit ~= 'closed' and old and old.models ~= models then due(node, now) end
rescore(node, active(id))
return {said, tostring(epoch)}

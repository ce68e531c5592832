#!lua _node
-- unregister: take a node out. It gets no new lease from this moment; its running leases
-- end in peace, and the last of them takes the node's keys with it.
--
-- KEYS[1] nodes     set   node ids
-- KEYS[2] node      hash  the record
-- ARGV[1] now       ms; '' = the server's clock
-- ARGV[2] prefix    of the pool's keys
-- ARGV[3] id        of the node
--
-- Returns the number of leases still running on it, or -1 when it is not known.

local node = read(ARGV[3])
redis.call('SREM', KEYS[1], ARGV[3])
redis.call('ZREM', prefix .. 'probes', ARGV[3])
redis.call('ZREM', prefix .. 'sweeps', ARGV[3])
redis.call('ZREM', prefix .. 'weights', ARGV[3])
if not node then return -1 end
if PREFIX then lose(node.id) end
due(node, nil)
for model in string.gmatch(node.models, '[^\n]+') do
  redis.call('ZREM', prefix .. 'score:' .. model, node.id)
end
redis.call('HSET', KEYS[2], 'state', 'removed', 'base', 0)
local n = active(node.id)
if n == 0 then forget(node.id) end
return n

#!lua _node
-- claim: take the duty to probe the nodes that are due. Whoever claims first probes; if it dies,
-- the nodes are due again one interval later and the next replica takes over.
--
-- KEYS[1] probes    zset  node -> ms at which its next probe is due
-- ARGV[1] now       ms; '' = the server's clock
-- ARGV[2] prefix    of the pool's keys
-- ARGV[3] interval  ms between two probes of a node, whoever makes them
-- ARGV[4] limit     nodes to claim at most
--
-- Returns the ids of the nodes that the caller is to probe now.

whole(3, 4)
local now = clock()
local ids = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, tonumber(ARGV[4]))
for _, id in ipairs(ids) do redis.call('ZADD', KEYS[1], now + tonumber(ARGV[3]), id) end
return ids

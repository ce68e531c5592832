#!lua _node
-- renew: the heartbeat of a replica keeps all its leases, however many streams it carries.
--
-- KEYS[1] replicas  zset  replica -> heartbeat expiry, ms
-- KEYS[2] leases    hash  lease id -> record, of the replica
-- ARGV[1] now       ms; '' = the server's clock
-- ARGV[2] prefix    of the pool's keys
-- ARGV[3] replica   id
-- ARGV[4] ttl       ms until the replica counts as dead
--
-- Returns {leases, known}: how many leases Redis knows of this replica, and 1 when it knew the
-- replica itself. Another number than the replica's own, or 0, means that something was
-- reaped, flushed or lost.

whole(4, 4)
local new = redis.call('ZADD', KEYS[1], clock() + tonumber(ARGV[4]), ARGV[3])
return {redis.call('HLEN', KEYS[2]), 1 - new}

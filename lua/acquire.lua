#!lua
-- acquire: pick the best node for a model and take its lease, in one step.
--
-- KEYS[1] score     zset  node -> live score, of the model
-- KEYS[2] due       zset  node -> ms at which an open or cooling node may be tried
-- KEYS[3] leases    hash  lease id -> 'node epoch start_ms prompt_tokens', of the replica
-- KEYS[4] replicas  zset  replica -> heartbeat expiry, ms
-- ARGV[1] now       ms; '' = the server's clock
-- ARGV[2] scoring   JSON: policy and constants
-- ARGV[3] prefix    of the pool's keys
-- ARGV[4] lease     id, minted by the replica before the call
-- ARGV[5] replica   id of the owner
-- ARGV[6] ttl       ms a silent replica keeps its leases
-- ARGV[7] size      prompt tokens, estimated
-- ARGV[8] chance    in [0, 1): draws among equals
-- ARGV[9...]        node ids already tried by this request
--
-- Returns {'leased', node, epoch, start_ms, score, trial} or {reason, retry_ms} with reason unknown,
-- down, full or spent. Repeating the call for the same lease returns the same node.

local held = redis.call('HGET', KEYS[3], ARGV[4])
if held then
  local lease = parse(ARGV[4], held)
  return {'leased', lease.node, tostring(lease.epoch), tostring(lease.start_ms), '0', '0'}
end
own(KEYS[4], ARGV[5], tonumber(ARGV[6]))
local tried, tries = tried_from(9)
return grant(KEYS[1], KEYS[2], KEYS[3], ARGV[4], tonumber(ARGV[7]), tonumber(ARGV[8]), tried, tries)

#!lua _node _circuit _finish _grant
-- move: end a failed attempt and lease another node: one step, never two leases at once.
--
-- KEYS[1] score     zset  node -> live score, of the model
-- KEYS[2] due       zset  node -> ms at which an open or cooling node may be tried
-- KEYS[3] leases    hash  lease id -> 'node epoch start_ms prompt_tokens', of the replica
-- KEYS[4] replicas  zset  replica -> heartbeat expiry, ms
-- ARGV[1] now       ms; '' = the server's clock
-- ARGV[2] prefix    of the pool's keys
-- ARGV[3] lease     id of the new lease, minted by the replica before the call
-- ARGV[4] replica   id of the owner
-- ARGV[5] ttl       ms a silent replica keeps its leases
-- ARGV[6] size      prompt tokens, estimated
-- ARGV[7] output    tokens of the answer, expected
-- ARGV[8] chance    in [0, 1): draws among equals, spreads the back-off
-- ARGV[9] blocks    of the prompt's prefix, 'hash tokens hash tokens ...'; '' = not followed
-- ARGV[10] old      id of the lease that ends
-- ARGV[11] outcome  of the old lease: failed or saturated
-- ARGV[12] cool     ms a saturated node asked to be left alone
-- ARGV[13...]       node ids already tried by this request
--
-- Returns what acquire returns. The old lease ends even when no other node can be leased.
-- Repeating the call for the same new lease returns the same record and ends nothing twice.

local chance = check_ask()
known_outcome(11)
whole(12, 12)
local held = redis.call('HGET', KEYS[3], ARGV[3])
if held then return {'leased', held, '0', '0'} end
finish(KEYS[3], ARGV[10], ARGV[11], tonumber(ARGV[12]), chance, 0, 0)
local tried, tries = tried_from(13)
return grant(KEYS[3], ARGV[3], chance, tried, tries)

#!lua _node _grant
-- acquire: pick the best node for a model and take its lease, in one step.
--
-- KEYS[1] score     zset  node -> live score, of the model
-- KEYS[2] due       zset  node -> ms at which an open or cooling node may be tried
-- KEYS[3] leases    hash  lease id -> 'node epoch start_ms prompt_tokens', of the replica
-- KEYS[4] replicas  zset  replica -> heartbeat expiry, ms
-- ARGV[1] now       ms; '' = the server's clock
-- ARGV[2] prefix    of the pool's keys
-- ARGV[3] lease     id, minted by the replica before the call
-- ARGV[4] replica   id of the owner
-- ARGV[5] ttl       ms a silent replica keeps its leases
-- ARGV[6] size      prompt tokens, estimated
-- ARGV[7] output    tokens of the answer, expected
-- ARGV[8] chance    in [0, 1): draws among equals
-- ARGV[9] blocks    of the prompt's prefix, 'hash tokens hash tokens ...'; '' = not followed
-- ARGV[10...]       node ids already tried by this request
--
-- Returns {'leased', record, score, trial} or {reason, retry_ms} with reason unknown, new, down,
-- full or spent. Repeating the call for the same lease returns the same record.

local chance = check_ask()
local tried, tries = tried_from(10)
return grant(KEYS[3], ARGV[3], chance, tried, tries)

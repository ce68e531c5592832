#!lua _node _limit
-- settle: put right what `admit` charged: the tokens that were used less those expected.
--
-- KEYS[1] limit     hash  requests, tokens, at (see _limit.lua), of the key
-- ARGV[1] now       ms; '' = the server's clock
-- ARGV[2] prefix    of the pool's keys
-- ARGV[3] rpm       requests per minute, 0 = no limit
-- ARGV[4] tpm       tokens per minute
-- ARGV[5] delta     tokens to add, below 0 to give back
--
-- Returns the tokens that are left.

whole(3, 4)
demand(string.find(ARGV[5], '^%-?%d+$'), 5)
local key, now = KEYS[1], clock()
local rpm, tpm = tonumber(ARGV[3]), tonumber(ARGV[4])
local requests, tokens = levels(key, now, rpm, tpm)
tokens = math.max(0, tokens + tonumber(ARGV[5]) * UNIT)
keep_levels(key, now, rpm, tpm, requests, tokens)
return math.max(0, math.floor(tpm - tokens / UNIT))

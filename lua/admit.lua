#!lua _node _limit
-- admit: count one request of an API key against both its limits, or refuse it and count nothing.
-- Both are looked at before either is written. (Libraries of rate limits take one limit at a time,
-- over a client of their own: a request that the second one refuses has used up the first.)
--
-- KEYS[1] limit     hash  requests, tokens, at (see _limit.lua), of the key
-- ARGV[1] now       ms; '' = the server's clock
-- ARGV[2] prefix    of the pool's keys
-- ARGV[3] rpm       requests per minute, 0 = no limit
-- ARGV[4] tpm       tokens per minute, 0 = no limit
-- ARGV[5] cost      tokens that the request is expected to use; `settle` puts it right
--
-- Returns {said, retry, requests left, ms until none is used, tokens left, ms until none is used};
-- said is 'admitted', or the limit that is reached: 'requests' or 'tokens' (the longer wait, when
-- both are), and retry the ms after which this request would be admitted.
-- A request that costs more than the whole limit costs the whole limit: it is admitted when no token
-- is used, so it does not wait for ever, and `settle` charges what it has used beyond that.

whole(3, 5)
local key, now = KEYS[1], clock()
local rpm, tpm = tonumber(ARGV[3]), tonumber(ARGV[4])
local cost = math.min(tonumber(ARGV[5]), tpm)
local requests, tokens, at = levels(key, now, rpm, tpm)

local function left(limit, used)
  return math.max(0, math.floor(limit - used / UNIT)), falls(used, limit)
end

local function reply(said, retry)
  local r, r_ms = left(rpm, requests)
  local t, t_ms = left(tpm, tokens)
  return {said, retry, r, r_ms, t, t_ms}
end

local request_ms = falls(requests + UNIT - rpm * UNIT, rpm)
local token_ms = falls(tokens + cost * UNIT - tpm * UNIT, tpm)
if request_ms > 0 or token_ms > 0 then
  -- A level from the future would not fall until the clock is there again.
  if at > now then keep_levels(key, now, rpm, tpm, requests, tokens) end
  return reply(request_ms > token_ms and 'requests' or 'tokens', math.max(request_ms, token_ms))
end
requests, tokens = requests + UNIT, tokens + cost * UNIT
keep_levels(key, now, rpm, tpm, requests, tokens)
return reply('admitted', 0)

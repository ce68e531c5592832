-- _limit: the two buckets of one API key, requests and tokens per minute; behind _node.
--
-- GCRA in its second form, the continuous-state leaky bucket
-- (https://en.wikipedia.org/wiki/Generic_cell_rate_algorithm): a level that what is used raises
-- and that falls by the limit every minute. One unit of use is 60000, so a level falls by `limit`
-- each ms and everything is a whole number: exactly the limit passes, not one more or less.
--
-- The limit's key is a hash: requests, tokens (the levels), at (ms at which they were so). An
-- absent key is two empty buckets; a key expires a minute after it is that.
--
-- These two verbs are not idempotent, so they are never sent again: an answer that is lost costs
-- the key one request more or less, for a minute.

local UNIT = 60000

-- Both levels as they are now, and the time at which they were written.
local function levels(key, now, rpm, tpm)
  local was = redis.call('HMGET', key, 'requests', 'tokens', 'at')
  local at = tonumber(was[3] or now)
  local past = math.max(0, now - at) -- below 0: the clock went back
  local function level(used, limit)
    return limit > 0 and math.max(0, (tonumber(used) or 0) - past * limit) or 0
  end
  return level(was[1], rpm), level(was[2], tpm), at
end

-- Ms until a level has fallen by `much`; 0 without a limit.
local function falls(much, limit)
  return limit > 0 and math.max(0, math.ceil(much / limit)) or 0
end

local function keep_levels(key, now, rpm, tpm, requests, tokens)
  redis.call('HSET', key, 'requests', string.format('%.0f', requests),
    'tokens', string.format('%.0f', tokens), 'at', string.format('%.0f', now))
  redis.call('PEXPIRE', key, math.max(falls(requests, rpm), falls(tokens, tpm)) + 60000)
end

-- _work: what policy `work` learns of a node and what a request would cost there; in front of
-- _node, when that is the policy. The arithmetic of app/cluster/score.py, in the same order.
--
-- Of each node a row of numbers, packed as doubles in the hash `work` (the verb `look` tells them);
-- COST, PER_PROMPT ... are its columns. INFLIGHT is a copy of the node's counter, so that a pick
-- reads one thing of a candidate.

local work_key, weights_key = ARGV[2] .. 'work', ARGV[2] .. 'weights'

local function median_weight()
  local n = redis.call('ZCARD', weights_key)
  local low = math.max(0, math.floor((n - 1) / 2))
  local middle = redis.call('ZRANGE', weights_key, low, math.floor(n / 2), 'WITHSCORES')
  if n % 2 == 1 then return tonumber(middle[2]) end
  return n > 0 and (middle[2] + middle[4]) / 2 or nil
end

-- What is thought of a node before its first sample: K over the K of a middle node of the pool.
local function prior(row, weight)
  row[WORKED] = MEAN_PROMPT_TOKENS + OVERHEAD_TOKENS
  row[WAITED_MS] = PRIOR_MS * (median_weight() or weight) / weight
end

-- Work in tokens until a request with `fresh` prompt tokens to prefill has its first one.
local function ahead_of(row, fresh)
  return row[QUEUED] + fresh + OVERHEAD_TOKENS + LEASE_TOKENS * row[INFLIGHT]
end

-- Tokens of work per ms of TTFT; a node that nobody waits for recovers with time.
local function rate_of(row, now)
  local rate = row[WORKED] / row[WAITED_MS]
  if row[WAITING] > 0 then return rate end
  if row[BEST_RATE] == 0 then return rate * UNTRIED_TIMES end
  local fade = math.exp(-math.max(0, now - row[SAMPLED_AT]) / RECOVER_MS)
  return row[BEST_RATE] + (rate - row[BEST_RATE]) * fade
end

-- ms per token decoded; recovers alike.
local function tpot_of(row, now)
  local tpot = row[DECODING_MS] / row[DECODED]
  if row[WAITING] > 0 then return tpot end
  local fade = math.exp(-math.max(0, now - row[ENDED_AT]) / RECOVER_MS)
  return row[BEST_TPOT] + (tpot - row[BEST_TPOT]) * fade
end

-- Recent share of failed attempts.
local function error_share(row, now)
  if row[BAD] == 0 then return 0 end
  local fade = math.exp(-math.max(0, now - row[ENDED_AT]) / ERROR_MEMORY_MS)
  return row[BAD] * fade / (row[SEEN] * fade + 2)
end

-- How long the engine keeps one more request waiting for a slot and for room in its KV cache: as many
-- stays as it is over its limits, where these are known.
local function admission_ms(row)
  local over = 0
  if row[SLOTS] > 0 then over = math.max(0, row[INFLIGHT] + 1 - row[SLOTS]) / row[SLOTS] end
  if row[KV_TOKENS] > 0 then
    local held = math.max(row[HELD], row[KV_USED] * row[KV_TOKENS])
      + (MEAN_PROMPT_TOKENS + MEAN_OUTPUT_TOKENS)
    over = over + math.max(0, held - row[KV_TOKENS]) / row[KV_TOKENS]
  end
  return row[STAY_MS] * over
end

-- What a request costs here, in ms: COST + PER_PROMPT * fresh tokens + PER_OUTPUT * tokens of the
-- answer, written into the row; a pick reads these three of a candidate. Wait, stall of others,
-- decoding, retries.
local function set_terms(row, now)
  local rate = rate_of(row, now)
  local base, prompt = ahead_of(row, 0) / rate, 1 / rate
  if row[WAITING] > 0 then -- a node that hangs gives no samples
    local silence = now - row[SILENT_SINCE]
    local usual = (MEAN_PROMPT_TOKENS + OVERHEAD_TOKENS) / rate
    if silence > HUNG_MS and silence > base + MEAN_PROMPT_TOKENS / rate
      and silence > HUNG_TIMES * usual then
      base, prompt = silence, 0
    end
  end
  base = base + admission_ms(row)
  prompt = prompt + STALL_SHARE * math.max(0, row[INFLIGHT] - row[WAITING]) / rate
  local output, failing = DECODE_SHARE * tpot_of(row, now), error_share(row, now)
  local tries = 1 / (1 - failing)
  row[COST] = (base + failing * ERROR_PRICE_MS) * tries
  row[PER_PROMPT], row[PER_OUTPUT] = prompt * tries, output * tries
end

local function new_row(weight, n, now)
  local row = {0, 0, 0, n, 0, 0, now, 0, 0, now, 0, 1, TPOT_PRIOR_MS, TPOT_PRIOR_MS, now, 0, 0,
    0, 0, 0, 0, 0, 0}
  prior(row, weight)
  set_terms(row, now)
  return row
end

-- The row of a node; a new one where there is none, or one that this version cannot read.
local function row_of(id, now, text)
  text = text or redis.call('HGET', work_key, id)
  if text and #text == 8 * COLUMNS then return {struct.unpack(ROW, text)} end
  local weight = tonumber(redis.call('HGET', ARGV[2] .. 'node:' .. id, 'weight') or '') or 1
  local n = tonumber(redis.call('GET', ARGV[2] .. 'active:' .. id) or '') or 0
  return new_row(weight, math.max(0, n), now)
end

-- Its terms alone.
local function terms_of(id, now, text)
  if text and #text == 8 * COLUMNS then return struct.unpack('<ddd', text) end
  return unpack(row_of(id, now, text), 1, 3)
end

-- The live score: of a request that nothing is known of.
local function blind_score(row)
  return 1000 / (row[COST] + row[PER_PROMPT] * math.max(MIN_PROMPT_TOKENS, MEAN_PROMPT_TOKENS)
    + row[PER_OUTPUT] * MEAN_OUTPUT_TOKENS)
end

-- Keep what was learned, with the terms that follow from it.
local function remember(id, row, now)
  set_terms(row, now)
  redis.call('HSET', work_key, id, struct.pack(ROW, unpack(row, 1, COLUMNS)))
end

-- The three events of a lease. `n` is the counter after it.
local function leased(row, now, fresh, held, n, heard)
  row[INFLIGHT] = n
  row[HELD] = row[HELD] + held
  if heard then return end -- put back after a loss, past its first token
  if row[WAITING] == 0 then row[SILENT_SINCE] = now end
  row[WAITING] = row[WAITING] + 1
  row[QUEUED] = row[QUEUED] + fresh
end

local function answered(row, fresh)
  row[WAITING] = math.max(0, row[WAITING] - 1)
  row[QUEUED] = row[WAITING] > 0 and math.max(0, row[QUEUED] - fresh) or 0
end

local function heard_of(row, now, ttft_ms, fresh, ahead)
  local age = math.max(0, now - row[SAMPLED_AT])
  local keep = KEEP * math.exp(-age / MEMORY_MS)
  if row[BEST_RATE] == 0 then row[BEST_RATE] = row[WORKED] / row[WAITED_MS] end -- the prior
  row[WORKED] = row[WORKED] * keep + ahead
  row[WAITED_MS] = row[WAITED_MS] * keep + math.max(LEAST_TTFT_MS, ttft_ms)
  local rate, best = row[WORKED] / row[WAITED_MS], row[BEST_RATE]
  if rate > best then
    row[BEST_RATE] = rate
  else
    row[BEST_RATE] = best + (rate - best) * (1 - math.exp(-age / BEST_MEMORY_MS))
  end
  row[SAMPLED_AT] = now
  row[SILENT_SINCE] = now
  answered(row, fresh)
end

local function decoded(row, now, tokens, decode_ms)
  local age = math.max(0, now - row[ENDED_AT])
  local keep = KEEP * math.exp(-age / MEMORY_MS)
  row[DECODED] = row[DECODED] * keep + tokens
  row[DECODING_MS] = row[DECODING_MS] * keep + decode_ms
  local tpot, best = row[DECODING_MS] / row[DECODED], row[BEST_TPOT]
  if tpot < best then
    row[BEST_TPOT] = tpot
  else
    row[BEST_TPOT] = best + (tpot - best) * (1 - math.exp(-age / BEST_MEMORY_MS))
  end
end

-- `tokens` are those after the first one, decoded in `decode_ms`.
local function over(row, now, lease, outcome, tokens, decode_ms)
  row[HELD] = row[INFLIGHT] > 0 and math.max(0, row[HELD] - lease.held) or 0
  if not lease.heard then answered(row, lease.fresh) end
  if outcome ~= 'ok' and outcome ~= 'failed' then return end
  row[SEEN] = row[SEEN] * ERROR_KEEP + 1
  row[BAD] = row[BAD] * ERROR_KEEP
  if outcome == 'failed' then
    row[BAD] = row[BAD] + 1
  else
    local stay = math.max(0, now - lease.start_ms)
    row[STAY_MS] = row[STAY_MS] > 0 and row[STAY_MS] + (stay - row[STAY_MS]) / 20 or stay
    if tokens > 0 then decoded(row, now, tokens, decode_ms) end
  end
  row[ENDED_AT] = now
end

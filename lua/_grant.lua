-- _grant: choosing a node and leasing it; after _node.

-- The nodes that a request has tried, as a set and a count: ARGV[from] and on.
local function tried_from(from)
  local tried, tries = {}, 0
  for i = from, #ARGV do
    tried[ARGV[i]] = true
    tries = tries + 1
  end
  return tried, tries
end

-- The best untried node of a model with its score, nil when there is none. Of equals, one by
-- chance. p2c and peak_ewma take the better of two drawn by chance. O(log N).
local function pick(score_key, tried, tries, chance)
  if TWO_CHOICES then
    local m = redis.call('ZCOUNT', score_key, '(0', '+inf')
    if m > tries + 1 then
      local a = math.floor(chance * m)
      local b = math.floor((chance * m - a) * (m - 1))
      if b >= a then b = b + 1 end
      local one = redis.call('ZREVRANGE', score_key, a, a, 'WITHSCORES')
      local two = redis.call('ZREVRANGE', score_key, b, b, 'WITHSCORES')
      -- Of equals the first drawn: by rank alone the last of the set would never be chosen.
      if one[2] ~= two[2] and b < a then one, two = two, one end
      if not tried[one[1]] then return one[1], one[2] end
      if not tried[two[1]] then return two[1], two[2] end
    end
  end
  local top = redis.call('ZREVRANGE', score_key, 0, tries + 1, 'WITHSCORES')
  local first, best, second
  for i = 1, #top, 2 do
    if not tried[top[i]] and top[i + 1] ~= '0' then
      if not first then
        first, best = top[i], top[i + 1]
      elseif top[i + 1] == best then
        second = top[i]
        break
      end
    end
  end
  if not second then return first, best end
  local above = redis.call('ZCOUNT', score_key, '(' .. best, '+inf')
  local equals = redis.call('ZCOUNT', score_key, best, best)
  local at = above + math.floor(chance * equals)
  local drawn = redis.call('ZREVRANGE', score_key, at, at)[1]
  if tried[drawn] then drawn = chance < 0.5 and first or second end
  return drawn, best
end

-- Prompt tokens that a node must prefill, `hit` of them being cached there.
local function fresh_of(size, hit)
  return math.max(MIN_PROMPT_TOKENS, size - (hit or 0))
end

-- Policy `work`: of the TOP_K untried nodes with the best scores, and of as many that hold most of
-- the prefix, the one on which this very request costs least; also its score and its row.
local function rank(score_key, tried, tries, chance, now, size, hits, near)
  local top = redis.call('ZREVRANGE', score_key, 0, TOP_K + tries - 1, 'WITHSCORES')
  local ids, scores = {}, {}
  for i = 1, #top, 2 do
    if not tried[top[i]] and top[i + 1] ~= '0' and #ids < TOP_K then
      ids[#ids + 1], scores[#ids + 1] = top[i], top[i + 1]
    end
  end
  if #ids == 0 then return nil end
  local others, ranked = {}, {}
  for _, id in ipairs(ids) do ranked[id] = true end
  for _, id in ipairs(near) do
    if not tried[id] and not ranked[id] and #others < TOP_K then others[#others + 1] = id end
  end
  if #others > 0 then
    for i, score in ipairs(redis.call('ZMSCORE', score_key, unpack(others))) do
      if score and tonumber(score) > 0 then
        ids[#ids + 1], scores[#scores + 1] = others[i], score
      end
    end
  end
  local texts, output = redis.call('HMGET', work_key, unpack(ids)), tonumber(ARGV[7])
  local least, equals = nil, {}
  for i = 1, #ids do
    local base, prompt, answer = terms_of(ids[i], now, texts[i])
    local cost = base + prompt * fresh_of(size, hits[ids[i]]) + answer * output
    if not least or cost < least then
      least, equals = cost, {i}
    elseif cost == least then
      equals[#equals + 1] = i
    end
  end
  local i = equals[math.floor(chance * #equals) + 1]
  return ids[i], scores[i], row_of(ids[i], now, texts[i])
end

-- No eligible node: the last resort, else {reason, retry in ms}. A probe may be wrong, and a
-- request may show it; an open circuit was opened by requests. `new` says that a node's first
-- probe is still to be answered: worth a short wait. Looks at a bounded number.
local function refuse(score_key, due_key, tried, now)
  local ids = redis.call('ZREVRANGE', score_key, 0, 15)
  if #ids == 0 then return nil, {'unknown', '0'} end
  local spent, full, new = true, false, false
  for _, id in ipairs(ids) do
    local node = not tried[id] and read(id)
    if node then
      spent = false
      if node.health == 'down' then
        node.health = 'ok'
        if base_of(node, now) > 0 and active(id) < node.capacity then return id, nil end
      elseif node.health == 'new' and node.misses < 1 then
        node.health = 'ok'
        if base_of(node, now) > 0 and active(id) < node.capacity then new = true end
      elseif base_of(node, now) > 0 then
        full = true
      end
    end
  end
  if new then return nil, {'new', '20'} end
  if spent then return nil, {'spent', '0'} end
  if full then return nil, {'full', '1000'} end
  local at = redis.call('ZRANGE', due_key, 0, 0, 'WITHSCORES')[2]
  return nil, {'down', tostring(at and math.max(1, math.ceil(tonumber(at) - now)) or 1000)}
end

-- The open node that is due for its single trial; cooled ones are made eligible again. A node that
-- this request has tried, or that cannot be tried now, does not stand in front of the others.
local function trial(due_key, id, tried, now)
  for _, first in ipairs(redis.call('ZRANGEBYSCORE', due_key, '-inf', now, 'LIMIT', 0, 16)) do
    local node, n = read(first), active(first)
    if not node then
      redis.call('ZREM', due_key, first)
    elseif node.circuit == 'closed' then
      due(node, node.cooling_until_ms > now and node.cooling_until_ms or nil)
      keep(node, n, now)
    elseif node.state ~= 'active' or node.health ~= 'ok' or n >= node.capacity then
      due(node, now + OPEN_MS) -- open and also down, draining or full: look again later
    elseif not tried[first] then
      due(node, now + TRIAL_MS) -- a trial that is never heard of again does not last for ever
      node.circuit, node.trial = 'half_open', id
      keep(node, n, now, 'circuit', 'half_open', 'trial', id)
      return first
    end
  end
  return nil
end

-- Count a lease that has just been written, and re-score its node. `heard` and what the row of
-- policy `work` needs, `fresh` tokens to prefill and `held` in all, are of the lease.
local function count(node_id, base, capacity, models, row, fresh, held, heard)
  local n = redis.call('INCR', prefix .. 'active:' .. node_id)
  if n < 1 then -- the counter was damaged from outside
    redis.call('SET', prefix .. 'active:' .. node_id, 1)
    n = 1
  end
  if POLICY == 'round_robin' and base > 0 then
    local picked = redis.call('INCR', prefix .. 'turn')
    base = 1 / (1 + picked)
    redis.call('HSET', prefix .. 'node:' .. node_id, 'picked', picked, 'base', string.format('%.17g', base))
  end
  if POLICY == 'work' then
    row = row or row_of(node_id, clock())
    leased(row, clock(), fresh, held, n, heard)
    remember(node_id, row, clock())
  end
  put(node_id, base, capacity, models, n, row)
end

-- A replica that leases is alive: one whose heartbeat was reaped is listed again at once, so
-- that no lease is ever without an owner who can be found dead.
local function own(replicas, replica, ttl_ms, now)
  if not redis.call('ZSCORE', replicas, replica) then
    redis.call('ZADD', replicas, now + ttl_ms, replica)
  end
end

-- Checks the arguments that `acquire` and `move` share.
local function check_ask()
  whole(5, 7)
  local chance = tonumber(ARGV[8])
  demand(chance and chance >= 0 and chance < 1, 8)
  demand(string.find(ARGV[9] or '-', '^[%x ]*$'), 9)
  return chance
end

-- Choose, lease, re-score: the one step that `acquire` and `move` share.
local function grant(leases, id, chance, tried, tries)
  local score_key, due_key, now = KEYS[1], KEYS[2], clock()
  local size, row, fresh, held = tonumber(ARGV[6]), nil, nil, nil
  local chain, hits, near = nil, {}, {}
  if PREFIX then
    chain = chain_of(ARGV[9])
    hits, near = hits_of(chain)
  end
  own(KEYS[4], ARGV[4], tonumber(ARGV[5]), now)
  local chosen, best, half_open, last_resort, refusal = nil, '0', '0', false, nil
  if redis.call('EXISTS', due_key) == 1 and redis.call('HEXISTS', leases, id) == 0 then
    chosen = trial(due_key, id, tried, now)
    if chosen then half_open = '1' end
  end
  while true do
    if not chosen and POLICY == 'work' then
      chosen, best, row = rank(score_key, tried, tries, chance, now, size, hits, near)
    elseif not chosen then
      chosen, best = pick(score_key, tried, tries, chance)
    end
    if not chosen then
      local held = redis.call('HGET', leases, id) -- asked again when it took the last place
      if held then return {'leased', held, '0', '0'} end
      chosen, refusal = refuse(score_key, due_key, tried, now)
      if refusal then return refusal end
      best, last_resort = '0', true -- a nil would end the reply
    end
    local base, capacity, models, epoch = unpack(redis.call('HMGET', prefix .. 'node:' .. chosen,
      'base', 'capacity', 'models', 'epoch'))
    base, capacity = tonumber(base or ''), tonumber(capacity or '')
    local n = models and (row and row[INFLIGHT] or active(chosen))
    if models and (half_open == '1' or last_resort or (base > 0 and n < capacity)) then
      local record = chosen .. ' ' .. epoch .. ' ' .. now .. ' ' .. ARGV[6]
      if POLICY == 'work' then
        row = row or row_of(chosen, now)
        fresh = fresh_of(size, hits[chosen])
        held = size + tonumber(ARGV[7])
        record = record .. ' ' .. fresh .. ' ' .. ahead_of(row, fresh) .. ' ' .. held
      end
      if redis.call('HSETNX', leases, id, record) == 0 then -- asked again: the same answer
        return {'leased', redis.call('HGET', leases, id), '0', '0'}
      end
      if PREFIX then hold(chosen, chain, row, now) end
      count(chosen, base, capacity, models, row, fresh, held, false)
      return {'leased', record, best, half_open}
    end
    -- A score that the record does not bear out (keys edited by hand): mend the set, look again.
    -- Each round takes one such node out, so this ends.
    redis.call('ZREM', score_key, chosen)
    if models then put(chosen, base, capacity, models, n) end
    chosen, row = nil, nil
  end
end

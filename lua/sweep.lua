#!lua _node
-- sweep: rewrite the scores of nodes whose last sweep is a while ago: windows age, idle nodes
-- recover, waits and cool-downs and slow starts end. A bounded batch; any replica may call it,
-- and a node is swept once an interval however many do.
--
-- KEYS[1] sweeps    zset  node -> ms at which its next sweep is due
-- ARGV[1] now       ms; '' = the server's clock
-- ARGV[2] prefix    of the pool's keys
-- ARGV[3] interval  ms between two sweeps of a node
-- ARGV[4] limit     nodes to sweep at most in this call (the script blocks the server)
--
-- Returns {nodes swept, 1 when more are due}.

whole(3, 4)
local now, limit = clock(), tonumber(ARGV[4])
local ids = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, limit)
for _, id in ipairs(ids) do
  local node = read(id)
  if node and node.state ~= 'removed' then
    redis.call('ZADD', KEYS[1], now + tonumber(ARGV[3]), id)
    if node.samples > 0 and now - node.last_sample_ms > SAMPLE_MAX_AGE_MS then
      redis.call('HSET', node.key, 'sum_us', 0, 'samples', 0) -- its list has expired as well
      redis.call('DEL', prefix .. 'ttft:' .. id)
      node.samples = 0
    end
    if POLICY == 'work' then
      node.row = row_of(id, now)
      redis.call('ZADD', prefix .. 'weights', node.weight, id) -- it may have been changed by hand
      if node.row[BEST_RATE] == 0 then prior(node.row, node.weight) end
      limits_of(node)
      remember(id, node.row, now)
      redis.call('HSET', node.key, 'tpot_us', string.format('%.1f', tpot_of(node.row, now) * 1000))
    end
    keep(node, active(id), now)
  else
    redis.call('ZREM', KEYS[1], id)
  end
end
return {#ids, redis.call('ZCOUNT', KEYS[1], '-inf', now) > 0 and 1 or 0}

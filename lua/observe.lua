#!lua _node
-- observe: fold what a probe or a replica saw of a node into its record, with hysteresis.
--
-- KEYS[1] node      hash  the record
-- ARGV[1] now       ms; '' = the server's clock
-- ARGV[2] prefix    of the pool's keys
-- ARGV[3] id        of the node
-- ARGV[4] epoch     that the observer knows; what was seen of an earlier life says nothing
-- ARGV[5] verdict   ready: its probe was answered well; loading: up, but not ready yet;
--                   miss: no proper answer; alive: requests get bytes from it;
--                   waiting: a request has waited for its first token for ARGV[6] ms
-- ARGV[6] value     ms, see waiting; '' otherwise
-- ARGV[7] valid     ms that a wait counts without being seen again
--
-- Returns {health before, health now}, or {'', ''} when the node is not known.

whole(4, 4)
demand(string.find(ARGV[5], '^%l+$')
  and string.find(' ready loading miss alive waiting ', ' ' .. ARGV[5] .. ' ', 1, true), 5)
if ARGV[5] == 'waiting' then whole(6, 7) end
local node, now, verdict = read(ARGV[3]), clock(), ARGV[5]
if not node or node.state == 'removed' or tostring(ARGV[4]) ~= string.format('%d', node.epoch) then
  return {'', ''}
end
local before = node.health
if verdict == 'ready' then
  if before ~= 'ok' then
    node.since_ms = now
    if PREFIX then -- most likely it has started anew
      lose(node.id)
      node.row = row_of(node.id, now)
      node.row[CACHED] = 0
      remember(node.id, node.row, now)
    end
    -- Its trial may have fallen due, and been put off, while it could not be tried.
    local open_ms = math.min(OPEN_MS * 2 ^ math.min(node.opens - 1, 20), OPEN_MAX_MS)
    if node.circuit == 'open' and node.tripped_at_ms + open_ms <= now then
      due(node, math.max(now, node.cooling_until_ms))
    end
  end
  node.health, node.misses = 'ok', 0
elseif verdict == 'loading' then
  node.health, node.misses = 'loading', 0
elseif verdict == 'miss' then
  node.misses = node.misses + 1
  if node.misses >= UNHEALTHY_AFTER then -- only what was well can be wrongly thought down
    node.health = before == 'ok' and 'down' or before == 'loading' and 'new' or before
  end
elseif verdict == 'alive' then
  -- A busy node answers its probes late; it is not dead while it delivers. Below zero: the next
  -- miss, of a probe that was on its way, is excused as well.
  node.misses = -1
elseif verdict == 'waiting' then
  node.waiting_ms, node.waiting_until_ms = tonumber(ARGV[6]), now + tonumber(ARGV[7])
end
keep(node, active(node.id), now, 'health', node.health, 'misses', node.misses,
  'since_ms', node.since_ms, 'waiting_ms', node.waiting_ms, 'waiting_until_ms', node.waiting_until_ms)
return {before, node.health}

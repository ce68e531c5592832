#!lua _node
-- edit: what an operator changes of a node by hand: written into its record, scored anew, and
-- kept as an edit, so that replicas can put it back when the record is lost or read from a file
-- again. An edit replaces the one that its writer has seen, or nothing is done.
--
-- KEYS[1] node      hash    the record
-- KEYS[2] edits     hash    node -> 'version edit'
-- KEYS[3] changes   string  the newest version of all edits; replicas watch it
-- ARGV[1] now       ms; '' = the server's clock
-- ARGV[2] prefix    of the pool's keys
-- ARGV[3] id        of the node
-- ARGV[4] version   of the edit that was seen; 0: there was none
-- ARGV[5] edit      all that is set by hand from now on (app/cluster/edits.py); '-': nothing any more
-- ARGV[6...]        pairs: field, value, for the record; none when that is left as it is
--
-- Returns {'done', version}; {'stale', version} when there is another edit by now; {'unknown', 0}
-- when there is no record to write to. Nothing is changed then.

demand(string.find(ARGV[3], '^%S+$'), 3)
whole(4, 4)
demand(#ARGV % 2 == 1, #ARGV)
local id, now, node = ARGV[3], clock(), read(ARGV[3])
local seen = string.match(redis.call('HGET', KEYS[2], id) or '0', '^%d+')
if seen ~= ARGV[4] then return {'stale', seen} end
if #ARGV > 5 and (not node or node.state == 'removed') then return {'unknown', '0'} end

local version = string.format('%d', math.max(now, tonumber(redis.call('GET', KEYS[3]) or 0) + 1))
redis.call('HSET', KEYS[2], id, version .. ' ' .. ARGV[5])
redis.call('SET', KEYS[3], version)
-- That nothing is set any more is news for as long as a replica may know of what was: a week.
for _, other in ipairs(redis.call('HRANDFIELD', KEYS[2], 2)) do
  local since = string.match(redis.call('HGET', KEYS[2], other), '^(%d+) %-$')
  if since and now - tonumber(since) > 7 * 86400000 then redis.call('HDEL', KEYS[2], other) end
end
if #ARGV == 5 then return {'done', version} end

local old, at = node, nil -- at: when an open or cooling node was to be looked at again
for model in string.gmatch(old.models, '[^\n]+') do
  at = at or redis.call('ZSCORE', prefix .. 'due:' .. model, id)
end
for i = 6, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
node = read(id)
if node.models ~= old.models then
  due(old, nil)
  for model in string.gmatch(old.models, '[^\n]+') do
    redis.call('ZREM', prefix .. 'score:' .. model, id)
  end
  if at then due(node, at) end
end
-- A node that is let in again is cold, like one that has just come up.
if node.state == 'active' and old.state ~= 'active' then node.since_ms = now end
redis.call('ZADD', prefix .. 'weights', 'XX', node.weight, id) -- is there with policy work
keep(node, active(id), now, 'since_ms', node.since_ms)
-- The next sweep is due: what policy work expects of a node follows its weight there, and whoever
-- edits may have other scoring settings than the replicas.
redis.call('ZADD', prefix .. 'sweeps', now, id)
return {'done', version}

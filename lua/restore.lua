#!lua _node
-- restore: put back edits that Redis has lost; of two of the same node the newer one stays.
--
-- KEYS[1] edits     hash    node -> 'version edit'
-- KEYS[2] changes   string  the newest version of all edits; replicas watch it
-- ARGV[1] now       ms; '' = the server's clock
-- ARGV[2] prefix    of the pool's keys
-- ARGV[3...]        pairs: node, 'version edit'
--
-- Returns how many were put back.

demand(#ARGV % 2 == 0, #ARGV)
for i = 3, #ARGV, 2 do demand(string.find(ARGV[i + 1], '^%d+ '), i + 1) end

local function version(text)
  return tonumber(string.match(text or '', '^%d+') or 0)
end

local newest, back = version(redis.call('GET', KEYS[2])), 0
for i = 3, #ARGV, 2 do
  if version(ARGV[i + 1]) > version(redis.call('HGET', KEYS[1], ARGV[i])) then
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
    newest, back = math.max(newest, version(ARGV[i + 1])), back + 1
  end
end
if back > 0 then redis.call('SET', KEYS[2], string.format('%d', newest)) end
return back

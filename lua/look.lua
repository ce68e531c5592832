#!lua _node
-- look: tell what policy `work` has learned of nodes, as numbers that can be read.
--
-- KEYS[1] work      hash  node -> row, packed (see _work)
-- ARGV[1] now       ms; '' = the server's clock
-- ARGV[2] prefix    of the pool's keys
-- ARGV[3...]        node ids
--
-- Returns one text for each node: the columns of its row, with a blank between; '' without one.

local told = {}
for i = 3, #ARGV do
  local text = redis.call('HGET', KEYS[1], ARGV[i])
  told[i - 2] = ''
  if text and #text == 8 * COLUMNS then
    local row = {struct.unpack(ROW, text)}
    for column = 1, COLUMNS do row[column] = string.format('%.17g', row[column]) end
    told[i - 2] = table.concat(row, ' ', 1, COLUMNS)
  end
end
return told

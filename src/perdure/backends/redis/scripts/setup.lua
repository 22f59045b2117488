-- the layout that this version writes -> the layout that is there, and what the server says of itself
local format = take()
redis.call('SET', root .. ':format', format, 'NX')
local sections = {}
for _, section in ipairs({ 'persistence', 'memory' }) do
  local info = redis.pcall('INFO', section)
  sections[#sections + 1] = type(info) == 'string' and info or ''
end
return { redis.call('GET', root .. ':format'), sections }

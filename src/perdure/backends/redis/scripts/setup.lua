-- the layout that this version writes -> the layout that is there, and what the server tells about itself
local format = take()
redis.call('SET', root .. ':format', format, 'NX')
local told = {}
for _, section in ipairs({ 'persistence', 'memory' }) do
  local info = redis.pcall('INFO', section)
  told[#told + 1] = type(info) == 'string' and info or ''
end
return { redis.call('GET', root .. ':format'), told }

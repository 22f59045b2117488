-- now, id, info; kept as the time, a colon, the info
local now, id = take_now(), take()
redis.call('HSET', root .. ':workers', id, int(now) .. ':' .. take())
return { 'ok' }

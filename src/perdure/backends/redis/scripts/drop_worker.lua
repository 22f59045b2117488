-- id
redis.call('HDEL', root .. ':workers', take())
return { 'ok' }

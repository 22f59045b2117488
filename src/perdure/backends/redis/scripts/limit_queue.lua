-- queue, concurrency or nothing, a colon, key_concurrency or nothing
redis.call('HSET', root .. ':limits', take(), take())
publish_change()
return { 'ok' }

-- id, the schedule as it is stored: next_at or nothing, a colon, the rest
redis.call('HSET', root .. ':schedules', take(), take())
publish_change()
return { 'ok' }

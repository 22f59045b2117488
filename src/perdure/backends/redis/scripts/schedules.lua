-- -> schedules, each after its id
return redis.call('HGETALL', root .. ':schedules')

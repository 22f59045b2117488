-- id -> columns
return redis.call('HGETALL', key('run', take()))

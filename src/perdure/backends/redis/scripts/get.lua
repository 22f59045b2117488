-- id -> columns
return redis.call('HGETALL', key_of('run', take()))

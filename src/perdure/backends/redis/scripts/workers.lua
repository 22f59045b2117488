-- -> workers, each after its id
return redis.call('HGETALL', root .. ':workers')

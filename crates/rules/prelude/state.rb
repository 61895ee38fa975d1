# State that rules keep between requests. Caches, values and locks themselves are in Rust; see src/api/state.rs.
class Cache
  extend Nagaya::Gaps
  include Nagaya::Gaps

  class CacheError < StandardError; end
  class ShmError < CacheError; end
  class MemoryPoolFull < CacheError; end
  class LockError < CacheError; end
  class LockTimedOut < CacheError; end
  class OutOfMemoryError < CacheError; end
  class ArgError < CacheError; end
  class InitError < CacheError; end
  class RecoveryFailed < CacheError; end
  class ShmLockFailed < CacheError; end
  class ShmUnlockFailed < CacheError; end
  class MemoryPoolClosed < CacheError; end
  class DBVersionNotSupported < CacheError; end

  def shm_status
    total, used = Nagaya.cache_usage
    free = total - used
    { free_bytes: free, total_bytes: total, used_bytes: used, free_chunks: 1, largest_chunk: free }
  end
end

class Mutex
  include Nagaya::Gaps

  # Both times are microseconds. True: the lock was not free in time, and the block has not run.
  def try_lock_loop(retrytime = 100_000, timeout = 5_000_000)
    return true unless lock_within(timeout)
    yield
    false
  end
end

# Any name is a value's, so it has none of the methods that all other objects have.
class Userdata < BasicObject
  def initialize(bag = "mrb_userdata_default_key")
    @bag = bag
  end

  def method_missing(name, *values)
    name = name.to_s
    if name[-1] == "="
      value = values[0]
      name = name[0..-2]
      if ::Cache === value || ::Mutex === value
        value.keep_in(@bag, name)
      else
        ::Nagaya.keep(@bag, name, value)
      end
      return value
    end
    kind, value = ::Nagaya.kept(@bag, name)
    case kind
    when 0 then value
    when 1 then ::Cache.new(namespace: value)
    when 2 then ::Cache.new(filename: value)
    when 3 then ::Mutex.new(name: value)
    end
  end

  def respond_to?(name, all = false)
    true
  end
end

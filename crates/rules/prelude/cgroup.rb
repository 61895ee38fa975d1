module Cgroup
  extend Nagaya::Gaps

  def root_attach(root)
    raise "root group not found" unless root.exist?
    root.attach
  end

  class CPU
    include Cgroup

    def cpuacct
      @cpuacct ||= CPUACCT.new(group_name)
    end
  end

  class CPUACCT
    include Cgroup
  end

  class CPUSET
    include Cgroup
  end

  class BLKIO
    include Cgroup
  end

  class MEMORY
    include Cgroup
  end

  class PIDS
    include Cgroup
  end
end

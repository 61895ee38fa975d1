# What the classes of mod_mruby and ngx_mruby have in common. What those servers have and nagaya has not says why when it
# is called; the reasons stand in src/api/compatibility.rs.
module Nagaya
  module Gaps
    def method_missing(name, *args)
      if Module === self
        why = Nagaya.gap(to_s, ".#{name}")
        raise NotImplementedError, "#{self}.#{name}: #{why}" if why
      else
        of = self.class.to_s
        why = Nagaya.gap(of, name)
        raise NotImplementedError, "#{of}##{name}: #{why}" if why
      end
      super
    end
  end

  # Both servers' words for writing an answer.
  module Writing
    def rputs(text)
      Nagaya.write(text.to_s)
      self
    end

    def echo(text)
      Nagaya.write("#{text}\n")
      self
    end
  end

  module MissingClasses
    def const_missing(name)
      of = "#{self}::#{name}"
      why = Nagaya.gap(of, "")
      raise NotImplementedError, "#{of}: #{why}" if why
      super
    end
  end
end

class Nginx
  extend Nagaya::Gaps
  extend Nagaya::MissingClasses
  extend Nagaya::Writing

  TRUE = "1"
  FALSE = "0"

  class Headers_in
    include Nagaya::Gaps

    def user_agent
      self["User-Agent"]
    end
  end

  class Headers_out
    include Nagaya::Gaps
  end

  class Var
    include Nagaya::Gaps

    def method_missing(name, *args)
      return read(name) if args.empty?
      super
    end
  end

  class Request
    include Nagaya::Gaps

    HEADERS_IN = Headers_in.new
    HEADERS_OUT = Headers_out.new
    VAR = Var.new

    def headers_in
      HEADERS_IN
    end

    def headers_out
      HEADERS_OUT
    end

    def var
      VAR
    end

    def read_body
      OK
    end

    def uri_args
      pairs = {}
      (args || "").split("&").each do |pair|
        name, value = pair.split("=", 2)
        pairs[name] = value
      end
      pairs
    end
  end

  class Connection
    include Nagaya::Gaps
  end

  class Server
    include Nagaya::Gaps
  end

  def self.var
    Request::VAR
  end
end

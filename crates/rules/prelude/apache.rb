# The objects beside a request have no state of their own: one of each is enough for all requests.
class Apache
  extend Nagaya::Gaps
  extend Nagaya::MissingClasses
  extend Nagaya::Writing

  class Notes
    include Nagaya::Gaps
  end

  class Headers_in
    include Nagaya::Gaps

    def user_agent
      self["User-Agent"]
    end

    def referer
      self["Referer"]
    end
  end

  class Headers_out
    include Nagaya::Gaps
  end

  class Request
    include Nagaya::Gaps

    NOTES = Notes.new
    HEADERS_IN = Headers_in.new
    HEADERS_OUT = Headers_out.new

    def notes
      NOTES
    end

    def headers_in
      HEADERS_IN
    end

    def headers_out
      HEADERS_OUT
    end
  end

  class Connection
    include Nagaya::Gaps
  end

  class Server
    include Nagaya::Gaps
  end

  class Env
    include Nagaya::Gaps
  end

  class Scoreboard
    include Nagaya::Gaps
  end
end

module Kernel
  def server_name
    "Apache"
  end

  def get_server_class
    Apache
  end

  def run(app)
    raise NotImplementedError, "run: #{Nagaya.gap("Kernel", "run")}"
  end
end

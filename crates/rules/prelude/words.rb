# nagaya's own words; limit, boost, cell, lane, demote, answer, redirect and log are natives.
module Nagaya
  class Request
    HEADER = Header.new

    def header
      HEADER
    end

    def user_agent
      HEADER["User-Agent"]
    end
  end

  REQUEST = Request.new
  NODE = Node.new
  SITE = Site.new
end

module Kernel
  def request
    Nagaya::REQUEST
  end

  def node
    Nagaya::NODE
  end

  # How full the site's lane is.
  def site
    Nagaya::SITE
  end

  # When the request arrived, in the node's time zone.
  def now
    Time.at(Nagaya.seconds)
  end

  # between "22:00".."06:00"
  def between(span)
    unless Range === span
      raise ArgumentError, "between takes a span such as \"22:00\"..\"06:00\""
    end
    time = now
    Nagaya.in_span?(time.hour * 60 + time.min, span.begin, span.end)
  end
end

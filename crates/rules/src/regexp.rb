# The Ruby half of Regexp; what searches is in src/regexp.rs.
class RegexpError < StandardError
end

class Regexp
  IGNORECASE = 1
  EXTENDED = 2
  MULTILINE = 4

  # A literal is compiled by this method at each evaluation. One object for each is kept; more than a rule writes come
  # from `/#{...}/`.
  KEPT_MAX = 64
  KEPT = {}

  def self.compile(source, options = nil, _encoding = nil)
    of_options = KEPT[options] ||= {}
    found = of_options[source]
    return found if found
    of_options.clear if of_options.size >= KEPT_MAX
    of_options[source] = new(source, options)
  end

  def self.union(*patterns)
    patterns = patterns[0] if patterns.size == 1 && Array === patterns[0]
    new(patterns.map { |pattern| Regexp === pattern ? pattern.to_s : escape(pattern) }.join("|"))
  end

  def self.last_match(group = nil)
    group && $~ ? $~[group] : $~
  end

  def match(text, from = 0)
    MatchData.remember(self, text, __find(text, from))
  end

  def =~(text)
    places = __find(text)
    MatchData.remember(self, text, places)
    places && places[0]
  end

  def ===(text)
    return false unless String === text || Symbol === text
    !(self =~ text).nil?
  end

  def ==(other)
    Regexp === other && source == other.source && options == other.options
  end

  alias eql? ==

  def hash
    source.hash
  end

  def casefold?
    options & IGNORECASE != 0
  end

  def to_s
    on = ""
    on += "m" if options & MULTILINE != 0
    on += "i" if casefold?
    on += "x" if options & EXTENDED != 0
    on.empty? ? "(?:#{source})" : "(?#{on}:#{source})"
  end

  def inspect
    "/#{source}/"
  end
end

class MatchData
  # How many of $1, $2... have a value.
  @groups = 0

  # Sets $~ and $1, $2... as each search does, and gives back $~.
  def self.remember(regexp, text, places)
    found = places && new(regexp, text.to_s, places)
    groups = found ? found.size - 1 : 0
    if groups > 0 || @groups > 0
      (found ? found.to_a : []).__set_groups
      @groups = groups
    end
    $~ = found
  end

  attr_reader :regexp, :string

  def initialize(regexp, string, places)
    @regexp = regexp
    @string = string
    @places = places
  end

  def [](group)
    if Integer === group
      group += size if group < 0
    else
      group = names.index(group.to_s)
      raise IndexError, "the pattern has no such group" unless group
      group += 1
    end
    return nil if group < 0 || group >= size
    from = @places[2 * group + 1]
    from < 0 ? nil : @string.byteslice(from, @places[2 * group + 2] - from)
  end

  def size
    @places.size / 2
  end

  alias length size

  def to_a
    (0...size).map { |group| self[group] }
  end

  def captures
    to_a[1..-1]
  end

  def names
    @regexp.names
  end

  def named_captures
    named = {}
    names.each_with_index { |name, at| named[name] = self[at + 1] if name }
    named
  end

  def values_at(*groups)
    groups.map { |group| self[group] }
  end

  def begin(group)
    from = @places[2 * group + 1]
    from < 0 ? nil : @string.byteslice(0, from).size
  end

  def end(group)
    to = @places[2 * group + 2]
    to < 0 ? nil : @string.byteslice(0, to).size
  end

  def pre_match
    @string.byteslice(0, @places[1])
  end

  def post_match
    @string.byteslice(@places[2], @string.bytesize - @places[2])
  end

  def to_s
    self[0]
  end

  def inspect
    "#<MatchData #{to_s.inspect}>"
  end
end

class String
  def =~(pattern)
    pattern =~ self
  end

  def match(pattern, from = 0)
    pattern = Regexp.compile(pattern) unless Regexp === pattern
    pattern.match(self, from)
  end

  def match?(pattern)
    pattern = Regexp.compile(pattern) unless Regexp === pattern
    pattern.match?(self)
  end

  def scan(pattern, &block)
    pattern = Regexp.compile(Regexp.escape(pattern)) unless Regexp === pattern
    found = pattern.__find_all(self).map do |places|
      match = MatchData.new(pattern, self, places)
      match.size > 1 ? match.captures : match[0]
    end
    return found unless block
    found.each(&block)
    self
  end

  alias __sub_text sub
  alias __gsub_text gsub
  alias __split_text split
  alias __index_text index
  alias __slice_text slice
  alias __start_with_text? start_with?

  def sub(pattern, *with, &block)
    return __sub_text(pattern, *with, &block) unless Regexp === pattern
    return pattern.__replace(self, with[0], false) if String === with[0]
    match = pattern.match(self)
    match ? match.pre_match + __replaced(match, with, block) + match.post_match : dup
  end

  def gsub(pattern, *with, &block)
    return __gsub_text(pattern, *with, &block) unless Regexp === pattern
    return pattern.__replace(self, with[0], true) if String === with[0]
    made = ""
    rest = 0
    pattern.__find_all(self).each do |places|
      match = MatchData.remember(pattern, self, places)
      made << byteslice(rest, places[1] - rest) << __replaced(match, with, block)
      rest = places[2]
    end
    made << byteslice(rest, bytesize - rest)
  end

  def __replaced(match, with, block)
    return with[0][match[0]].to_s if Hash === with[0]
    raise ArgumentError, "a replacement or a block is needed" unless block
    block.call(match[0]).to_s
  end

  def split(pattern = nil, limit = 0)
    Regexp === pattern ? pattern.__split(self, limit) : __split_text(pattern, limit)
  end

  def index(pattern, from = 0)
    return __index_text(pattern, from) unless Regexp === pattern
    places = pattern.__find(self, self[0, from].bytesize)
    places && places[0]
  end

  def slice(*args)
    return __slice_text(*args) unless Regexp === args[0]
    match = args[0].match(self)
    match && match[args[1] || 0]
  end

  alias [] slice

  def start_with?(*prefixes)
    prefixes.any? do |prefix|
      if Regexp === prefix
        match = prefix.match(self)
        !match.nil? && match.begin(0) == 0
      else
        __start_with_text?(prefix)
      end
    end
  end
end

class Symbol
  def =~(pattern)
    pattern =~ self
  end
end

# A field that a request does not have matches nothing.
class NilClass
  def =~(_)
    nil
  end
end

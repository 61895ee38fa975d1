//! Who asks, and for what: people or programs, in which language, or a crawler.
//!
//! Not here: what they get (`page`).

/// Parts of a header field that are looked at; what is behind them does not count.
const PARTS_MAX: usize = 32;

/// Words of `User-Agent` that are looked at.
const AGENT_WORDS_MAX: usize = 64;

/// Words by which crawlers and link previews call themselves: letters, digits and `_`, between anything else.
const CRAWLERS: &[&str] = &[
    "adsbot",
    "ahrefsbot",
    "amazonbot",
    "applebot",
    "baiduspider",
    "barkrowler",
    "bingbot",
    "bingpreview",
    "bytespider",
    "ccbot",
    "claudebot",
    "dataforseobot",
    "discordbot",
    "dotbot",
    "duckduckbot",
    "externalagent",
    "facebookexternalhit",
    "feedfetcher",
    "googlebot",
    "googleother",
    "gptbot",
    "ia_archiver",
    "inspectiontool",
    "linkedinbot",
    "mediapartners",
    "mj12bot",
    "msnbot",
    "org_bot",
    "perplexitybot",
    "petalbot",
    "pinterestbot",
    "qwantbot",
    "searchbot",
    "semrushbot",
    "seznambot",
    "slackbot",
    "slurp",
    "sogou",
    "telegrambot",
    "twitterbot",
    "yandexbot",
    "yandeximages",
    "yeti",
];

/// What the page can be written in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Language {
    English,
    Japanese,
}

impl Language {
    /// The language's tag (RFC 5646).
    pub const fn tag(self) -> &'static str {
        match self {
            Self::English => "en",
            Self::Japanese => "ja",
        }
    }
}

/// The language that is wanted most, of those there are (RFC 9110 section 12.5.4). Of equals the first one; English, if none is
/// wanted.
pub fn language(accept_language: Option<&str>) -> Language {
    let mut best = (0, Language::English);
    for (range, quality) in parts(accept_language.unwrap_or("")) {
        let primary = range.split('-').next().unwrap_or("");
        let language = if primary.eq_ignore_ascii_case("ja") {
            Language::Japanese
        } else if primary.eq_ignore_ascii_case("en") {
            Language::English
        } else {
            continue;
        };
        if quality > best.0 {
            best = (quality, language);
        }
    }
    best.1
}

/// Whether a page is wanted rather than a document for programs: HTML is named, and no JSON is wanted more. Browsers name it;
/// `*/*` alone is what programs send.
pub fn wants_html(accept: Option<&str>) -> bool {
    let (mut html, mut json) = (0, 0);
    for (kind, quality) in parts(accept.unwrap_or("")) {
        let is = |name: &str| kind.eq_ignore_ascii_case(name);
        if is("text/html") || is("application/xhtml+xml") || is("text/*") {
            html = html.max(quality);
        } else if is("application/json") || is("application/problem+json") {
            json = json.max(quality);
        }
    }
    html > 0 && html >= json
}

/// Whether a crawler asks: it gets no ticket, as it does not come back for it.
pub fn is_crawler(user_agent: Option<&str>) -> bool {
    let words = user_agent.unwrap_or("").split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let mut words = words.filter(|word| !word.is_empty()).take(AGENT_WORDS_MAX);
    words.any(|word| CRAWLERS.iter().any(|crawler| word.eq_ignore_ascii_case(crawler)))
}

/// The parts of a field's value, each with its quality in thousandths. A quality that is none counts as 0.
fn parts(value: &str) -> impl Iterator<Item = (&str, u32)> {
    value.split(',').take(PARTS_MAX).map(|part| {
        let mut parameters = part.split(';');
        let name = parameters.next().unwrap_or("").trim();
        let quality = parameters.find_map(|parameter| {
            let (key, value) = parameter.split_once('=')?;
            key.trim().eq_ignore_ascii_case("q").then(|| thousandths(value.trim()))
        });
        (name, quality.unwrap_or(1000))
    })
}

/// A quality (RFC 9110 section 12.4.2) in thousandths.
fn thousandths(value: &str) -> u32 {
    match value.parse::<f32>() {
        Ok(quality) if (0.0..=1.0).contains(&quality) => (quality * 1000.0).round() as u32,
        _ => 0,
    }
}

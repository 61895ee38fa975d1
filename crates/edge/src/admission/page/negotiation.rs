//! Does content negotiation for the waiting page: people or programs, the language, crawlers.
//!
//! Not here: the content (`page`).

/// Maximum number of parts of a header field that are read. Later ones are ignored.
const PARTS_MAX: usize = 32;

/// Maximum number of words of `User-Agent` that are read.
const AGENT_WORDS_MAX: usize = 64;

/// Names of crawlers and link previews. A name consists of letters, digits and `_`, between other
/// characters.
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

/// Languages of the page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageLanguage {
    English,
    Japanese,
}

impl PageLanguage {
    /// Returns the language's tag (RFC 5646).
    pub const fn tag(self) -> &'static str {
        match self {
            Self::English => "en",
            Self::Japanese => "ja",
        }
    }
}

/// Returns the preferred one of the available languages (RFC 9110 section 12.5.4). Of equal ones
/// it takes the first. If none is wanted, it is English.
pub fn language(accept_language: Option<&str>) -> PageLanguage {
    let mut best = (0, PageLanguage::English);
    for (range, quality) in parts(accept_language.unwrap_or("")) {
        let primary = range.split('-').next().unwrap_or("");
        let language = if primary.eq_ignore_ascii_case("ja") {
            PageLanguage::Japanese
        } else if primary.eq_ignore_ascii_case("en") {
            PageLanguage::English
        } else {
            continue;
        };
        if quality > best.0 {
            best = (quality, language);
        }
    }
    best.1
}

/// Returns whether the client prefers a page to a document for programs. The field must name HTML
/// and prefer no JSON. Browsers name HTML. `*/*` alone comes from programs.
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

/// Returns whether the client is a crawler. It gets no ticket, because it would not come back
/// with it.
pub fn is_crawler(user_agent: Option<&str>) -> bool {
    let words = user_agent.unwrap_or("").split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let mut words = words.filter(|word| !word.is_empty()).take(AGENT_WORDS_MAX);
    words.any(|word| CRAWLERS.iter().any(|crawler| word.eq_ignore_ascii_case(crawler)))
}

/// Returns the parts of a field's value, each with its quality in thousandths. An invalid quality
/// counts as 0.
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

/// Returns a quality (RFC 9110 section 12.4.2) in thousandths.
fn thousandths(value: &str) -> u32 {
    match value.parse::<f32>() {
        Ok(quality) if (0.0..=1.0).contains(&quality) => (quality * 1000.0).round() as u32,
        _ => 0,
    }
}

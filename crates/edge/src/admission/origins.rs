//! Remembers the origins whose scripts may read the lane's responses.
//!
//! A browser hides a response without `Access-Control-Allow-Origin` from scripts of another
//! origin (Fetch standard). The lane's responses are nagaya's, but the site decides who may read
//! its responses. So the lane repeats the recent permissions of the site's own responses, and
//! grants nothing else. An origin that the site never named reads nothing. Credentials are
//! allowed only if the site allowed them to that origin.
//!
//! A program that repeats any origin can be made to fill the list. Then the oldest entry goes,
//! and its client restores it with its next preflight. Not here: preflights (`guests`).

use std::time::{Duration, Instant};

use http::header::{
    ACCESS_CONTROL_ALLOW_CREDENTIALS, ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_EXPOSE_HEADERS, ORIGIN,
    VARY,
};
use http::{HeaderMap, HeaderValue};
use parking_lot::RwLock;

/// Maximum number of origins remembered for one site.
const ORIGINS_MAX: usize = 16;

/// Maximum length of a remembered origin, bytes: a scheme, a host name and a port.
const ORIGIN_LEN_MAX: usize = 280;

/// Time for which a site's permission holds.
const AGE_MAX: Duration = Duration::from_secs(3600);

/// Minimum age of an entry before it is refreshed.
const NOTED_EVERY: Duration = Duration::from_secs(60);

/// Fields of the lane's responses that a script may read.
const EXPOSED: HeaderValue = HeaderValue::from_static("Retry-After, Nagaya-Ticket");

const ANY: &[u8] = b"*";

/// Permissions of one site.
#[derive(Debug, Default)]
pub struct SiteOrigins(RwLock<Vec<AllowedOrigin>>);

#[derive(Debug)]
struct AllowedOrigin {
    /// The value `*` means any origin, without credentials.
    origin: Box<[u8]>,
    with_credentials: bool,
    at: Instant,
}

impl SiteOrigins {
    /// Records the permissions in a response of the site.
    pub fn learn(&self, headers: &HeaderMap, now: Instant) {
        let Some(value) = headers.get(ACCESS_CONTROL_ALLOW_ORIGIN) else { return };
        let origin = value.as_bytes();
        if origin.len() > ORIGIN_LEN_MAX || origin != ANY && !is_origin(origin) {
            return;
        }
        let credentials = headers.get(ACCESS_CONTROL_ALLOW_CREDENTIALS);
        let with_credentials = origin != ANY && credentials.is_some_and(|value| value == "true");
        let is_noted = |said: &AllowedOrigin| {
            *said.origin == *origin
                && said.with_credentials == with_credentials
                && now.saturating_duration_since(said.at) < NOTED_EVERY
        };
        if self.0.read().iter().any(is_noted) {
            return;
        }
        let mut all = self.0.write();
        all.retain(|said| *said.origin != *origin);
        if all.len() >= ORIGINS_MAX {
            all.remove(0);
        }
        all.push(AllowedOrigin { origin: origin.into(), with_credentials, at: now });
    }

    /// Lets the script of `origin` read this response, if the site has let it read others.
    pub fn let_read(&self, origin: &HeaderValue, headers: &mut HeaderMap, now: Instant) {
        let all = self.0.read();
        let find = |wanted: &[u8]| {
            let is_meant = |said: &&AllowedOrigin| *said.origin == *wanted;
            all.iter().filter(|said| now.saturating_duration_since(said.at) < AGE_MAX).find(is_meant)
        };
        let Some(said) = find(origin.as_bytes()).or_else(|| find(ANY)) else { return };
        let is_any = *said.origin == *ANY;
        let allowed = if is_any { HeaderValue::from_static("*") } else { origin.clone() };
        headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, allowed);
        headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
        headers.append(VARY, HeaderValue::from_name(ORIGIN));
        if said.with_credentials {
            headers.insert(ACCESS_CONTROL_ALLOW_CREDENTIALS, HeaderValue::from_static("true"));
        }
    }
}

/// Returns whether it is a serialized origin with a host. `null` could be anybody.
fn is_origin(text: &[u8]) -> bool {
    let is_part = |byte: &u8| byte.is_ascii_alphanumeric() || b"+-.:[]/".contains(byte);
    text.iter().all(is_part)
        && memchr::memmem::find(text, b"://").is_some_and(|at| at > 0 && at + 3 < text.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(origin: &str, credentials: bool) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_str(origin).unwrap());
        if credentials {
            headers.insert(ACCESS_CONTROL_ALLOW_CREDENTIALS, HeaderValue::from_static("true"));
        }
        headers
    }

    fn read(origins: &SiteOrigins, origin: &'static str, now: Instant) -> (Option<String>, bool) {
        let mut headers = HeaderMap::new();
        origins.let_read(&HeaderValue::from_static(origin), &mut headers, now);
        let allowed = headers.get(ACCESS_CONTROL_ALLOW_ORIGIN);
        let allowed = allowed.map(|value| value.to_str().unwrap().to_owned());
        (allowed, headers.contains_key(ACCESS_CONTROL_ALLOW_CREDENTIALS))
    }

    #[test]
    fn the_line_repeats_what_the_site_has_said() {
        let (origins, now) = (SiteOrigins::default(), Instant::now());
        assert_eq!(read(&origins, "https://a.test", now), (None, false));
        for said in ["null", "https://", "a.test", "https://a.test, https://b.test", "https://a b"] {
            origins.learn(&answer(said, true), now);
            assert!(origins.0.read().is_empty(), "{said}");
        }
        origins.learn(&answer("https://a.test", true), now);
        assert_eq!(read(&origins, "https://a.test", now), (Some("https://a.test".into()), true));
        assert_eq!(read(&origins, "https://b.test", now), (None, false));
        assert_eq!(read(&origins, "https://a.test", now + AGE_MAX), (None, false));
        origins.learn(&answer("*", true), now);
        assert_eq!(read(&origins, "https://b.test", now), (Some("*".into()), false));
        assert_eq!(read(&origins, "null", now), (Some("*".into()), false));
        origins.learn(&answer("https://a.test", false), now);
        assert_eq!(read(&origins, "https://a.test", now), (Some("https://a.test".into()), false));
    }

    #[test]
    fn the_oldest_goes() {
        let (origins, now) = (SiteOrigins::default(), Instant::now());
        for n in 0..=ORIGINS_MAX {
            origins.learn(&answer(&format!("https://{n}.test"), false), now);
        }
        assert_eq!(origins.0.read().len(), ORIGINS_MAX);
        assert_eq!(read(&origins, "https://0.test", now), (None, false));
        assert_eq!(read(&origins, "https://1.test", now).0.as_deref(), Some("https://1.test"));
    }
}

//! The waiting page: what is in it, what cannot get into it, and who gets it.

use nagaya_admission::Moment;
use nagaya_base::Code;
use proptest::prelude::*;

use crate::admission::page::messages::PageMessages;
use crate::admission::page::negotiation::{PageLanguage, is_crawler, language, wants_html};
use crate::admission::page::{
    HTML, PageFacts, SCRIPT, STYLE, TicketOffer, TicketView, base64, csp, problem_json, render, render_own,
};

/// A page must fit into the first packets of a connection.
const PAGE_MAX: usize = 8 * 1024;

const BOTH: [PageLanguage; 2] = [PageLanguage::English, PageLanguage::Japanese];

fn kept(events_path: &str) -> Option<TicketOffer<'_>> {
    Some(TicketOffer { window_seconds: 20, events_path })
}

fn facts(language: PageLanguage) -> PageFacts<'static> {
    PageFacts {
        site: "shop.example",
        ahead: Some(12),
        wait_seconds: Some(40),
        at_most_seconds: Some(60),
        begins_in_seconds: 40,
        kept: kept("/.nagaya/wait/0123456789abcdef"),
        is_post: false,
        language,
        request_id: "01J0000000000000",
    }
}

fn between<'a>(text: &'a str, begin: &str, end: &str) -> &'a str {
    let (_, rest) = text.split_once(begin).expect("it begins");
    rest.split_once(end).expect("it ends").0
}

#[test]
fn it_tells_the_place_and_the_time_with_its_uncertainty() {
    let page = render(&facts(PageLanguage::English));
    assert!(page.contains("<p id=\"place\">12 visitors go before you.</p>"), "{page}");
    assert!(page.contains("Your turn comes in about 40 s, at most 60 s.</p>"), "{page}");
    assert!(page.contains("your place is kept for 20 s."), "{page}");
    assert!(page.contains("shop.example is busy right now"), "{page}");
    let page = render(&facts(PageLanguage::Japanese));
    assert!(page.contains("あなたの前に 12 人います。"), "{page}");
    assert!(page.contains("あと約 40 秒、長くても 60 秒で順番が来ます。"), "{page}");
}

#[test]
fn page_says_which_facts_are_unknown() {
    let unknown = PageFacts { wait_seconds: None, ahead: Some(0), ..facts(PageLanguage::English) };
    let page = render(&unknown);
    assert!(page.contains("How long it takes is not known yet.</p>"), "{page}");
    assert!(page.contains("<p id=\"place\">Nobody goes before you.</p>"), "{page}");
    assert!(page.contains("data-wait=\"\""), "{page}");
    let page = render(&PageFacts { at_most_seconds: None, ahead: Some(1), ..facts(PageLanguage::English) });
    assert!(page.contains("Your turn comes in about 40 s.</p>"), "{page}");
    assert!(page.contains("<p id=\"place\">1 visitor goes before you.</p>"), "{page}");
}

#[test]
fn long_times_are_told_in_larger_units() {
    let words = PageMessages::of(PageLanguage::English, true);
    let told = [0, 90, 91, 3600, 5400, 5401, 86_400].map(|seconds| words.time(seconds));
    assert_eq!(told, ["0 s", "90 s", "2 min", "60 min", "90 min", "1 h 31 min", "24 h 0 min"]);
    assert_eq!(PageMessages::of(PageLanguage::Japanese, true).time(7260), "2 時間 1 分");
    // The script counts in the same units.
    assert!(SCRIPT.contains("seconds <= 90") && SCRIPT.contains("minutes <= 90"));
}

#[test]
fn it_is_small_whatever_is_told() {
    let site = "x".repeat(253);
    let events = "/.nagaya/wait/".to_owned() + &"0".repeat(64);
    for language in BOTH {
        for (is_post, is_kept) in [(false, true), (true, true), (false, false), (true, false)] {
            let most = Some(u32::MAX);
            let worst = PageFacts {
                site: &site,
                ahead: Some(u32::MAX),
                wait_seconds: most,
                at_most_seconds: most,
                begins_in_seconds: u32::MAX,
                kept: is_kept.then_some(TicketOffer { window_seconds: u32::MAX, events_path: &events }),
                is_post,
                ..facts(language)
            };
            let size = render(&worst).len();
            assert!(size < PAGE_MAX, "{size} bytes");
        }
    }
}

#[test]
fn it_needs_nothing_from_elsewhere() {
    for language in BOTH {
        let page = render(&facts(language));
        for outside in
            ["http:", "https:", "src=", "href=", "@import", "url(", "<link", "<img", "<form", "innerHTML"]
        {
            assert!(!page.contains(outside), "{outside}");
        }
        assert!(!page.contains("{{"), "a placeholder is left: {page}");
        // Neither handlers nor styles in attributes: the policy would not let them.
        assert!(!page.contains(" onclick") && !page.contains(" style="));
    }
}

#[test]
fn the_policy_allows_just_this_style_and_script() {
    let page = render(&facts(PageLanguage::Japanese));
    for (element, directive) in [("style", "style-src"), ("script", "script-src")] {
        let text = between(&page, &format!("<{element}>"), &format!("</{element}>"));
        let hash = base64(ring::digest::digest(&ring::digest::SHA256, text.as_bytes()).as_ref());
        assert!(csp().contains(&format!("{directive} 'sha256-{hash}';")), "{}", csp());
        assert_eq!(page.matches(&format!("<{element}")).count(), 1);
    }
    assert!(csp().starts_with("default-src 'none';") && csp().contains("connect-src 'self';"));
    assert!(!csp().contains("unsafe"));
    // With any, browsers refuse to send a form again by reloading, as the page bids them.
    assert!(!csp().contains("form-action"));
    assert!(http::HeaderValue::from_str(csp()).is_ok());
}

#[test]
fn base64_is_that_of_the_standard() {
    let coded = ["", "f", "fo", "foo", "foob", "fooba", "foobar"].map(|text| base64(text.as_bytes()));
    assert_eq!(coded, ["", "Zg==", "Zm8=", "Zm9v", "Zm9vYg==", "Zm9vYmE=", "Zm9vYmFy"]);
    assert_eq!(base64(&[0xFB, 0xFF, 0xFE]), "+//+");
}

#[test]
fn it_can_be_read_by_those_who_do_not_see_it() {
    for (language, tag) in BOTH.into_iter().zip(["en", "ja"]) {
        let page = render(&facts(language));
        assert!(page.contains(&format!("<html lang=\"{tag}\">")));
        assert_eq!(page.matches("<main").count(), 1);
        assert_eq!(page.matches("<h1").count(), 1);
        // Of a timer each second would be read out if it were live; what is new is told by the status.
        assert!(page.contains("<p id=\"clock\" role=\"timer\">"));
        assert!(page.contains("<p id=\"live\" role=\"status\" aria-live=\"polite\"></p>"));
    }
    assert!(!STYLE.contains("animation") && !STYLE.contains("transition"), "nothing moves");
}

/// Relative luminance and contrast as WCAG 2.2 defines them.
fn contrast(one: &str, other: &str) -> f64 {
    let luminance = |colour: &str| {
        let part = |at: usize| {
            let value = u8::from_str_radix(&colour[at..at + 2], 16).expect("two hexadecimal digits");
            let value = f64::from(value) / 255.0;
            if value <= 0.04045 { value / 12.92 } else { ((value + 0.055) / 1.055).powf(2.4) }
        };
        0.2126 * part(1) + 0.7152 * part(3) + 0.0722 * part(5)
    };
    let (one, other) = (luminance(one), luminance(other));
    (one.max(other) + 0.05) / (one.min(other) + 0.05)
}

#[test]
fn its_colours_have_contrast_in_light_and_dark() {
    let schemes: Vec<_> =
        STYLE.split(":root {").skip(1).map(|rest| rest.split('}').next().unwrap_or("")).collect();
    assert_eq!(schemes.len(), 2, "a light one and a dark one");
    for scheme in schemes {
        let colour =
            |name: &str| between(&format!("{scheme};"), &format!("--{name}: "), ";").trim().to_owned();
        for (text, back) in
            [("text", "back"), ("quiet", "back"), ("line", "back"), ("on-line", "line"), ("on-off", "off")]
        {
            let ratio = contrast(&colour(text), &colour(back));
            assert!(ratio >= 4.5, "{text} on {back}: {ratio:.2}");
        }
    }
}

#[test]
fn the_script_finds_what_it_looks_for() {
    for (at, _) in SCRIPT.match_indices("element(\"") {
        let id = between(&SCRIPT[at..], "element(\"", "\"");
        assert!(HTML.contains(&format!("id=\"{id}\"")), "{id}");
    }
    for (at, _) in SCRIPT.match_indices("data.") {
        let rest = &SCRIPT[at + 5..];
        let name: String = rest.chars().take_while(char::is_ascii_alphabetic).collect();
        // `event.data` is what came by the stream.
        assert!(name.is_empty() || HTML.contains(&format!("data-{name}=\"{{{{")), "{name}");
    }
}

#[test]
fn page_repeats_a_post_only_when_its_user_agrees() {
    let post = render(&PageFacts { is_post: true, ..facts(PageLanguage::English) });
    assert!(post.contains("data-post=\"yes\"") && post.contains("press the button"), "{post}");
    assert!(post.contains("reload this page, and confirm"), "without scripts: {post}");
    assert!(post.contains("<noscript></noscript>"), "it would come again without what was sent: {post}");
    let get = render(&facts(PageLanguage::English));
    assert!(get.contains("data-post=\"no\"") && get.contains("reloads by itself"), "{get}");
    assert!(get.contains("<noscript><meta http-equiv=\"refresh\" content=\"40\"></noscript>"), "{get}");
}

#[test]
fn markup_in_what_is_told_stays_text() {
    let evil = "\"><script>alert('x')</script>&{{ahead}}";
    let told = PageFacts { site: evil, kept: kept(evil), request_id: evil, ..facts(PageLanguage::English) };
    let page = render(&told);
    assert_eq!(page.matches("<script>").count(), 1, "{page}");
    assert!(page.contains("&#60;script&#62;alert(&#39;x&#39;)"), "{page}");
    let own = render_own("<p title=\"{{events}}\">{{request}}</p>", &told);
    assert_eq!(own.matches('<').count(), 2, "{own}");
    assert!(own.contains("{{ahead}}"), "what is filled in is not filled again: {own}");
}

#[test]
fn the_wording_needs_no_escaping() {
    for (language, is_kept) in BOTH.into_iter().flat_map(|language| [(language, true), (language, false)]) {
        let words = PageMessages::of(language, is_kept);
        let all = [
            words.title,
            words.heading,
            words.busy,
            words.none,
            words.one,
            words.many,
            words.both,
            words.about,
            words.unknown,
            words.soon,
            words.kept,
            words.with_get,
            words.with_post,
            words.without_get,
            words.without_post,
            words.send,
            words.turn_get,
            words.turn_post,
            words.request,
            words.seconds,
            words.minutes,
            words.hours,
        ];
        for text in all {
            assert!(!text.contains(['&', '<', '>', '"', '\'']), "{text}");
        }
    }
}

#[test]
fn a_site_has_a_page_of_its_own() {
    let template = "{{ahead}} before you, {{wait}} s, at most {{at_most}} s, from {{begins_in}} s on; \
                    {{events}} {{request}} {{unknown}} {{";
    let page = render_own(template, &facts(PageLanguage::English));
    assert_eq!(
        page,
        "12 before you, 40 s, at most 60 s, from 40 s on; /.nagaya/wait/0123456789abcdef 01J0000000000000 \
         {{unknown}} {{"
    );
    let unknown = PageFacts { wait_seconds: None, at_most_seconds: None, ..facts(PageLanguage::English) };
    assert_eq!(render_own("[{{wait}}{{at_most}}]", &unknown), "[]");
}

#[test]
fn programs_get_a_problem_document() {
    let slot = Moment(1_800_000_000_500_000)..Moment(1_800_000_020_000_000);
    let told = PageFacts { site: "a\"b", at_most_seconds: None, ..facts(PageLanguage::English) };
    let document: serde_json::Value =
        serde_json::from_str(&problem_json(&told, Some(&TicketView { text: "TICKET", slot }), Code(450)))
            .expect("it is JSON");
    assert_eq!(document["type"], "urn:nagaya:NGY0450");
    assert_eq!(document["status"], 503);
    assert_eq!(document["code"], "NGY0450");
    assert_eq!(document["position"], 13);
    assert_eq!(document["predicted_wait_seconds"], 40);
    assert_eq!(document["at_most_seconds"], serde_json::Value::Null);
    assert_eq!(document["ticket"], "TICKET");
    assert_eq!(document["not_before"], 1_800_000_001, "not before it begins, in whole seconds");
    assert_eq!(document["not_after"], 1_800_000_020);
    assert!(
        document["title"].is_string() && document["detail"].as_str().is_some_and(|it| it.contains("a\"b"))
    );
}

#[test]
fn without_a_ticket_nothing_is_promised() {
    let none = PageFacts { kept: None, begins_in_seconds: 7, ..facts(PageLanguage::English) };
    let page = render(&none);
    assert!(page.contains("<p id=\"place\">12 visitors are in line.</p>"), "{page}");
    assert!(page.contains("<p id=\"clock\" role=\"timer\">Next try in 7 s.</p>"), "{page}");
    assert!(page.contains("data-events=\"\"") && page.contains("data-begins=\"7\""), "{page}");
    assert!(page.contains("<noscript><meta http-equiv=\"refresh\" content=\"7\"></noscript>"), "{page}");
    assert!(page.contains("data-wait=\"7\"") && page.contains("data-most=\"\""), "{page}");
    assert!(!page.contains("is kept") && !page.contains("Your turn"), "{page}");
    let post = render(&PageFacts { is_post: true, ahead: None, ..none });
    assert!(post.contains("Nothing you sent has been acted on yet."), "{post}");
    assert!(post.contains("<p id=\"place\"></p>") && post.contains("data-ahead=\"\""), "{post}");
    let japanese = render(&PageFacts { language: PageLanguage::Japanese, ..none });
    assert!(japanese.contains("12 人が待っています。") && japanese.contains("あと 7 秒"), "{japanese}");
    assert_eq!(render_own("[{{events}}] {{begins_in}}", &none), "[] 7");

    let document: serde_json::Value =
        serde_json::from_str(&problem_json(&none, None, Code(413))).expect("it is JSON");
    assert_eq!(document["type"], "urn:nagaya:NGY0413");
    assert_eq!((&document["position"], &document["predicted_wait_seconds"]), (&13.into(), &40.into()));
    assert!(["ticket", "not_before", "not_after"].iter().all(|field| document.get(field).is_none()));
    assert!(document["detail"].as_str().is_some_and(|it| it.contains("in 7 seconds")), "{document}");
    let unknown = PageFacts { ahead: None, wait_seconds: None, ..none };
    let document: serde_json::Value =
        serde_json::from_str(&problem_json(&unknown, None, Code(414))).expect("it is JSON");
    assert!(document["position"].is_null() && document["predicted_wait_seconds"].is_null(), "{document}");
}

#[test]
fn the_language_is_the_one_wanted_most() {
    let wanted = [
        (None, PageLanguage::English),
        (Some("ja"), PageLanguage::Japanese),
        (Some("ja-JP,ja;q=0.9,en-US;q=0.8,en;q=0.7"), PageLanguage::Japanese),
        (Some("en-US,en;q=0.9,ja;q=0.8"), PageLanguage::English),
        (Some("en;q=0.4, JA ; q=0.5"), PageLanguage::Japanese),
        (Some("fr-FR,fr;q=0.9,ja;q=0.2"), PageLanguage::Japanese),
        (Some("de"), PageLanguage::English),
        (Some("*"), PageLanguage::English),
        (Some("ja;q=0, en;q=0.1"), PageLanguage::English),
        (Some("ja;q=0"), PageLanguage::English),
        (Some("jam, en;q=0.1"), PageLanguage::English),
        (Some("ja;q=abc, en;q=0.1"), PageLanguage::English),
        (Some("ja;q=NaN, en;q=0.001"), PageLanguage::English),
    ];
    for (field, expected) in wanted {
        assert_eq!(language(field), expected, "{field:?}");
    }
}

#[test]
fn browsers_get_the_page_and_programs_do_not() {
    for accept in [
        "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8",
        "Text/HTML; charset=utf-8",
        "text/html, application/json",
        "application/json;q=0.5, text/html;q=0.6",
    ] {
        assert!(wants_html(Some(accept)), "{accept}");
    }
    for accept in
        ["*/*", "application/json", "text/html;q=0", "application/problem+json, text/html;q=0.9", ""]
    {
        assert!(!wants_html(Some(accept)), "{accept}");
    }
    assert!(!wants_html(None));
}

#[test]
fn crawlers_are_known_by_their_names() {
    for agent in [
        "Mozilla/5.0 (compatible; Googlebot/2.1; +http://www.google.com/bot.html)",
        "Mozilla/5.0 AppleWebKit/537.36 (KHTML, like Gecko; compatible; bingbot/2.0; +http://www.bing.com/bingbot.htm)",
        "Googlebot-Image/1.0",
        "facebookexternalhit/1.1",
        "Mozilla/5.0 (compatible; archive.org_bot +http://archive.org/details/archive.org_bot)",
        "Mozilla/5.0 (compatible; OAI-SearchBot/1.0; +https://openai.com/searchbot)",
        "AdsBot-Google (+http://www.google.com/adsbot.html)",
    ] {
        assert!(is_crawler(Some(agent)), "{agent}");
    }
    for agent in [
        "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/120.0.0.0 Safari/537.36",
        "Mozilla/5.0 (Linux; Android 13; CUBOT NOTE) Mobile",
        "NotGooglebot/1.0",
        "Googlebots/1.0",
        "curl/8.5.0",
        "",
    ] {
        assert!(!is_crawler(Some(agent)), "{agent}");
    }
    assert!(!is_crawler(None));
}

proptest! {
    #[test]
    fn no_text_gets_out_of_its_place(site in ".{0,60}", id in ".{0,60}", events in ".{0,60}") {
        let plain = render(&facts(PageLanguage::English));
        let told = PageFacts { site: &site, request_id: &id, kept: kept(&events), ..facts(PageLanguage::English) };
        let page = render(&told);
        for mark in ['<', '>', '"'] {
            prop_assert_eq!(page.matches(mark).count(), plain.matches(mark).count());
        }
    }

    #[test]
    fn header_fields_may_hold_anything(field in ".{0,200}") {
        wants_html(Some(&field));
        language(Some(&field));
        is_crawler(Some(&field));
    }
}

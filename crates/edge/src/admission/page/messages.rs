//! Holds the messages of the waiting page, in English and Japanese.
//!
//! A `{}` is filled in: here for the page as it is sent, and later by its script. Both get the same
//! wording. Not here: which language (`negotiation`).

use crate::admission::page::fill_in;
use crate::admission::page::negotiation::PageLanguage;

/// Maximum time shown in seconds. `MINUTES_MAX` is the maximum shown in minutes. The script has
/// the same values.
const SECONDS_MAX: u32 = 90;
const MINUTES_MAX: u32 = 90;

/// The messages of one language. None of them needs escaping, which a test checks.
pub struct PageMessages {
    /// Filled with the site.
    pub title: &'static str,
    pub heading: &'static str,
    pub busy: &'static str,
    /// Number of requests that go first.
    pub none: &'static str,
    pub one: &'static str,
    pub many: &'static str,
    /// The expected time and the longest one.
    pub both: &'static str,
    pub about: &'static str,
    pub unknown: &'static str,
    pub soon: &'static str,
    /// Time for which the place is kept.
    pub kept: &'static str,
    /// With scripts and without.
    pub with_get: &'static str,
    pub with_post: &'static str,
    pub without_get: &'static str,
    pub without_post: &'static str,
    pub send: &'static str,
    pub turn_get: &'static str,
    pub turn_post: &'static str,
    pub request: &'static str,
    pub seconds: &'static str,
    pub minutes: &'static str,
    pub hours: &'static str,
}

const ENGLISH: PageMessages = PageMessages {
    title: "You are in line: {}",
    heading: "You are in line",
    busy: "{} is busy right now. Your turn is reserved.",
    none: "Nobody goes before you.",
    one: "1 visitor goes before you.",
    many: "{} visitors go before you.",
    both: "Your turn comes in about {}, at most {}.",
    about: "Your turn comes in about {}.",
    unknown: "How long it takes is not known yet.",
    soon: "Your turn comes any moment now.",
    kept: "When it comes, your place is kept for {}.",
    with_get: "Keep this page open. It lets you in by itself, earlier if it can.",
    with_post: "Nothing you sent has been acted on yet. Keep this page open. When it is your turn, press the button, and \
                confirm that your browser sends it again.",
    without_get: "This page reloads by itself when it is your turn.",
    without_post: "Nothing you sent has been acted on yet. When the time has passed, reload this page, and confirm that your \
                   browser sends it again.",
    send: "Send now",
    turn_get: "It is your turn.",
    turn_post: "It is your turn. Press the button to send.",
    request: "Request",
    seconds: "{} s",
    minutes: "{} min",
    hours: "{} h {} min",
};

const JAPANESE: PageMessages = PageMessages {
    title: "順番をお待ちください: {}",
    heading: "順番をお待ちください",
    busy: "{} はただいま混み合っています。あなたの順番は確保されています。",
    none: "あなたの前に待っている人はいません。",
    one: "あなたの前に 1 人います。",
    many: "あなたの前に {} 人います。",
    both: "あと約 {}、長くても {}で順番が来ます。",
    about: "あと約 {}で順番が来ます。",
    unknown: "待ち時間はまだわかりません。",
    soon: "まもなく順番が来ます。",
    kept: "順番が来てから {}のあいだ、場所を確保します。",
    with_get: "このページを開いたままお待ちください。順番が来ると自動的に入れます。早まることもあります。",
    with_post: "送信された内容はまだ処理されていません。このページを開いたままお待ちになり、順番が来たらボタンを押して、再送信を確認してください。",
    without_get: "順番が来ると、このページは自動的に再読み込みされます。",
    without_post: "送信された内容はまだ処理されていません。時間になったらこのページを再読み込みして、再送信を確認してください。",
    send: "今すぐ送信",
    turn_get: "順番が来ました。",
    turn_post: "順番が来ました。ボタンを押して送信してください。",
    request: "リクエスト",
    seconds: "{} 秒",
    minutes: "{} 分",
    hours: "{} 時間 {} 分",
};

/// Messages if nothing is promised. The place is a newcomer's, and the time is that of the next
/// attempt.
const ENGLISH_UNKEPT: PageMessages = PageMessages {
    title: "Busy right now: {}",
    heading: "Please try again soon",
    busy: "{} is busy right now. No turn is reserved for you.",
    none: "Nobody is in line.",
    one: "1 visitor is in line.",
    many: "{} visitors are in line.",
    both: "Next try in {}.",
    about: "Next try in {}.",
    soon: "Next try any moment now.",
    kept: "",
    with_get: "Keep this page open. It tries again by itself.",
    with_post: "Nothing you sent has been acted on yet. Keep this page open. When the time has passed, press the button, and \
                confirm that your browser sends it again.",
    without_get: "This page reloads by itself when the time has passed.",
    turn_get: "Trying again.",
    turn_post: "Press the button to send again.",
    ..ENGLISH
};

const JAPANESE_UNKEPT: PageMessages = PageMessages {
    title: "ただいま混み合っています: {}",
    heading: "しばらくお待ちください",
    busy: "{} はただいま混み合っています。あなたの順番は確保されていません。",
    none: "待っている人はいません。",
    one: "1 人が待っています。",
    many: "{} 人が待っています。",
    both: "あと {}で再試行できます。",
    about: "あと {}で再試行できます。",
    soon: "まもなく再試行できます。",
    kept: "",
    with_get: "このページを開いたままお待ちください。自動的に再試行します。",
    with_post: "送信された内容はまだ処理されていません。このページを開いたままお待ちになり、時間になったらボタンを押して、再送信を確認してください。",
    without_get: "時間になると、このページは自動的に再読み込みされます。",
    turn_get: "再試行しています。",
    turn_post: "ボタンを押して再送信してください。",
    ..JAPANESE
};

impl PageMessages {
    /// `is_kept` is true if a place is promised.
    pub fn of(language: PageLanguage, is_kept: bool) -> &'static Self {
        match (language, is_kept) {
            (PageLanguage::English, true) => &ENGLISH,
            (PageLanguage::English, false) => &ENGLISH_UNKEPT,
            (PageLanguage::Japanese, true) => &JAPANESE,
            (PageLanguage::Japanese, false) => &JAPANESE_UNKEPT,
        }
    }

    /// Returns the message for the placeholder of this name.
    pub fn get(&self, name: &str) -> Option<&'static str> {
        Some(match name {
            "heading" => self.heading,
            "none" => self.none,
            "one" => self.one,
            "many" => self.many,
            "both" => self.both,
            "about" => self.about,
            "unknown" => self.unknown,
            "soon" => self.soon,
            "send" => self.send,
            "request_label" => self.request,
            "seconds" => self.seconds,
            "minutes" => self.minutes,
            "hours" => self.hours,
            _ => return None,
        })
    }

    pub fn place(&self, ahead: u32) -> String {
        match ahead {
            0 => self.none.into(),
            1 => self.one.into(),
            _ => fill_in(self.many, &[&ahead.to_string()]),
        }
    }

    pub fn clock(&self, wait: Option<u32>, at_most: Option<u32>) -> String {
        match (wait, at_most) {
            (None, _) => self.unknown.into(),
            (Some(0), _) => self.soon.into(),
            (Some(wait), Some(most)) if most >= wait => {
                fill_in(self.both, &[&self.time(wait), &self.time(most)])
            }
            (Some(wait), _) => fill_in(self.about, &[&self.time(wait)]),
        }
    }

    pub fn time(&self, seconds: u32) -> String {
        let minutes = seconds.div_ceil(60);
        if seconds <= SECONDS_MAX {
            fill_in(self.seconds, &[&seconds.to_string()])
        } else if minutes <= MINUTES_MAX {
            fill_in(self.minutes, &[&minutes.to_string()])
        } else {
            fill_in(self.hours, &[&(minutes / 60).to_string(), &(minutes % 60).to_string()])
        }
    }
}

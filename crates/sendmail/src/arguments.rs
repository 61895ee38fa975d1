//! Arguments as programs give them to `sendmail`: those of sendmail(8) that concern sending one
//! message.
//!
//! Arguments that only change queueing are accepted and have no effect. Pure.

use std::ffi::OsString;

/// Recipients on the command line.
const RECIPIENTS_MAX: usize = 10_000;

/// Options whose value may be the next argument.
const WITH_VALUE: &str = "BCFfhLNOopRrVX";

/// Options without one. `e`, as `-em`, has its value directly after it.
const WITHOUT_VALUE: &str = "eGimnstUv";

#[derive(Debug, Default, PartialEq, Eq)]
pub struct MailArguments {
    /// `-t`: the message names recipients, too.
    pub reads_recipients: bool,
    /// `-i`: a line of one dot does not end the message.
    pub ignores_dots: bool,
    /// `-f`, without brackets. May be empty.
    pub sender: Option<String>,
    /// `-F`.
    pub full_name: Option<String>,
    pub recipients: Vec<String>,
}

impl MailArguments {
    /// Parses the arguments.
    ///
    /// # Errors
    /// Fails, with a text, for unknown arguments.
    pub fn parse(arguments: &[OsString]) -> Result<Self, String> {
        let mut parsed = Self::default();
        let mut rest = arguments.iter().map(|argument| argument.to_str().ok_or("an argument is not UTF-8"));
        let mut is_over = false;
        while let Some(argument) = rest.next().transpose()? {
            let option = argument.strip_prefix('-').filter(|option| !option.is_empty() && !is_over);
            let Some(option) = option else {
                parsed.recipients.extend(super::addresses::read_list(argument)?);
                if parsed.recipients.len() > RECIPIENTS_MAX {
                    return Err(format!("more than {RECIPIENTS_MAX} recipients"));
                }
                continue;
            };
            if option == "-" {
                is_over = true;
                continue;
            }
            let mut letters = option.chars();
            let letter = letters.next().unwrap_or_default();
            let attached = letters.as_str();
            if WITH_VALUE.contains(letter) {
                let value = if attached.is_empty() {
                    rest.next().transpose()?.ok_or_else(|| format!("-{letter} needs a value"))?
                } else {
                    attached
                };
                parsed.take_value(letter, value);
            } else if letter == 'b' {
                if attached != "m" {
                    return Err(format!("-b{attached}: this sendmail sends messages, and does nothing else"));
                }
            } else if WITHOUT_VALUE.contains(letter) {
                parsed.take(letter);
                // Letters may be joined, as in `-ti`.
                attached.chars().filter(|_| letter != 'e').for_each(|letter| parsed.take(letter));
            } else {
                return Err(format!("-{option} is not known here"));
            }
        }
        Ok(parsed)
    }

    fn take(&mut self, letter: char) {
        match letter {
            't' => self.reads_recipients = true,
            'i' => self.ignores_dots = true,
            _ => {}
        }
    }

    fn take_value(&mut self, letter: char, value: &str) {
        match letter {
            'f' | 'r' => {
                let bare = value.trim().trim_start_matches('<').trim_end_matches('>');
                self.sender = Some(bare.to_owned());
            }
            'F' => self.full_name = Some(value.to_owned()),
            'o' if value == "i" => self.ignores_dots = true,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<MailArguments, String> {
        let words: Vec<OsString> =
            line.split(' ').filter(|word| !word.is_empty()).map(OsString::from).collect();
        MailArguments::parse(&words)
    }

    #[test]
    fn arguments_of_usual_programs_are_understood() {
        // PHP, PHPMailer, Perl's MIME::Lite, cron, mailx.
        for (line, sender, recipients, reads) in [
            ("-t -i", None, vec![], true),
            ("-ti -fme@a.test", Some("me@a.test"), vec![], true),
            ("-oi -f me@a.test -t", Some("me@a.test"), vec![], true),
            ("-t -oi -oem", None, vec![], true),
            ("-i -FCronDaemon -B8BITMIME -oem root", None, vec!["root"], false),
            (
                "-i -f <> -- -odd@a.test b@a.test,c@a.test",
                Some(""),
                vec!["-odd@a.test", "b@a.test", "c@a.test"],
                false,
            ),
            ("-bm -v a@a.test", None, vec!["a@a.test"], false),
            ("-N never -R hdrs a@a.test", None, vec!["a@a.test"], false),
        ] {
            let parsed = parse(line).unwrap();
            assert_eq!(parsed.sender.as_deref(), sender, "{line}");
            assert_eq!(parsed.recipients, recipients, "{line}");
            assert_eq!(parsed.reads_recipients, reads, "{line}");
        }
        assert!(parse("-oi").unwrap().ignores_dots && parse("-ti").unwrap().ignores_dots);
        assert_eq!(parse("-F Me -t").unwrap().full_name.as_deref(), Some("Me"));
    }

    #[test]
    fn options_that_do_not_send_are_refused() {
        for line in ["-bs", "-bp", "-bd", "-bi", "-q", "-qf", "-f", "--version", "-Z"] {
            assert!(parse(line).is_err(), "{line}");
        }
        let list = "a@b.test,".repeat(RECIPIENTS_MAX / 2 + 1);
        assert!(parse(&list).is_ok() && parse(&format!("{list} {list}")).is_err(), "bounded altogether");
    }
}

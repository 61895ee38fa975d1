//! Finds the end of a message's text, and refuses text that two servers may read differently.
//!
//! Lines end with CR LF and with nothing else, and the message with a line of one dot (RFC 5321
//! sections 2.3.8 and 4.1.1.4). A CR or LF alone is refused: servers exist that take such a line
//! for the end, and what follows for a message more. Pure; the bytes themselves are passed on as
//! they are.

/// Position in a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TextPosition {
    LineStart,
    Line,
    Cr,
    Dot,
    DotCr,
}

/// State of a text after some of its bytes.
#[derive(Debug, PartialEq, Eq)]
pub enum TextProgress {
    /// All bytes belong to it, and more will.
    Open,
    /// This number of bytes belongs to it. The rest is commands.
    Ended(usize),
    /// It has a line that can be read in two ways.
    BareLineEnd,
}

/// Reads a text piece by piece.
#[derive(Debug)]
pub struct TextReader(TextPosition);

impl Default for TextReader {
    fn default() -> Self {
        Self(TextPosition::LineStart)
    }
}

impl TextReader {
    pub fn read(&mut self, piece: &[u8]) -> TextProgress {
        for (index, byte) in piece.iter().enumerate() {
            self.0 = match (self.0, byte) {
                (TextPosition::DotCr, b'\n') => return TextProgress::Ended(index + 1),
                (TextPosition::Cr, b'\n') => TextPosition::LineStart,
                (_, b'\n') | (TextPosition::Cr | TextPosition::DotCr, _) => return TextProgress::BareLineEnd,
                (TextPosition::Dot, b'\r') => TextPosition::DotCr,
                (TextPosition::LineStart, b'.') => TextPosition::Dot,
                (_, b'\r') => TextPosition::Cr,
                _ => TextPosition::Line,
            };
        }
        TextProgress::Open
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &[u8]) -> TextProgress {
        TextReader::default().read(text)
    }

    #[test]
    fn a_text_ends_with_a_dot_alone() {
        for (text, end) in [
            (&b".\r\n"[..], 3),
            (b"a\r\n.\r\nQUIT\r\n", 6),
            (b"..\r\n.a\r\n.\r\n", 11),
            (b"\r\n\r\n.\r\nx", 7),
        ] {
            assert_eq!(read(text), TextProgress::Ended(end), "{}", text.escape_ascii());
        }
        assert_eq!(read(b"a.\r\n..\r\n"), TextProgress::Open);
    }

    #[test]
    fn bare_line_ends_that_servers_read_differently_are_refused() {
        for text in
            [&b"a\n"[..], b"a\n.\r\n", b"a\r\n.\n", b"a\r.\r\n", b"a\r\n.\rx", b"a\r\r\n", b".\n", b"\n"]
        {
            assert_eq!(read(text), TextProgress::BareLineEnd, "{}", text.escape_ascii());
        }
    }

    #[test]
    fn pieces_mean_the_same_as_the_whole() {
        for text in [&b"a\r\n..b\r\n.\r\nrest"[..], b"a\r\n.\r", b"ab\ncd", b".\r\r"] {
            let whole = read(text);
            for size in 1..text.len() {
                let mut reader = TextReader::default();
                let (mut at, mut last) = (0, TextProgress::Open);
                for piece in text.chunks(size) {
                    last = reader.read(piece);
                    if let TextProgress::Ended(count) = last {
                        last = TextProgress::Ended(at + count);
                    }
                    if last != TextProgress::Open {
                        break;
                    }
                    at += piece.len();
                }
                assert_eq!(last, whole, "{} by {size}", text.escape_ascii());
            }
        }
    }
}

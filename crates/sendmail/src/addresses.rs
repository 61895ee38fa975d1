//! Reads lists of addresses in fields of a message and on a command line (RFC 5322 section 3.4).
//! Returns their mailboxes. Pure.
//!
//! Names, comments and groups are skipped. Not here: which addresses the relay accepts.

/// Addresses of one list.
const ADDRESSES_MAX: usize = 10_000;

/// Reads the list.
///
/// # Errors
/// Fails, with a text, if it is not closed, or too long.
pub fn read_list(text: &str) -> Result<Vec<String>, String> {
    let mut list = AddressList::default();
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        match character {
            '(' => skip_comment(&mut characters)?,
            '"' => list.add_quoted(&mut characters)?,
            '<' => list.begin_angle(),
            '>' => list.is_closed = true,
            ',' | ';' => list.end()?,
            // The name of a group.
            ':' if list.angle.is_none() => list.bare.clear(),
            _ if character.is_whitespace() => {}
            _ => list.add(character),
        }
    }
    if list.angle.is_some() && !list.is_closed {
        return Err("an address is not closed with '>'".into());
    }
    list.end()?;
    Ok(list.found)
}

#[derive(Default)]
struct AddressList {
    found: Vec<String>,
    bare: String,
    angle: Option<String>,
    is_closed: bool,
}

impl AddressList {
    fn begin_angle(&mut self) {
        self.angle = Some(String::new());
        self.is_closed = false;
    }

    fn add(&mut self, character: char) {
        match &mut self.angle {
            Some(_) if self.is_closed => {}
            Some(address) => address.push(character),
            None => self.bare.push(character),
        }
    }

    fn add_quoted(&mut self, characters: &mut std::str::Chars<'_>) -> Result<(), String> {
        self.add('"');
        while let Some(character) = characters.next() {
            self.add(character);
            match character {
                '"' => return Ok(()),
                '\\' => {
                    if let Some(next) = characters.next() {
                        self.add(next);
                    }
                }
                _ => {}
            }
        }
        Err("a quoted name is not closed".into())
    }

    fn end(&mut self) -> Result<(), String> {
        let bare = std::mem::take(&mut self.bare);
        let address = self.angle.take().unwrap_or(bare);
        self.is_closed = false;
        if address.is_empty() {
            return Ok(());
        }
        if self.found.len() >= ADDRESSES_MAX {
            return Err(format!("more than {ADDRESSES_MAX} addresses"));
        }
        self.found.push(address);
        Ok(())
    }
}

fn skip_comment(characters: &mut std::str::Chars<'_>) -> Result<(), String> {
    let mut depth = 1_u32;
    while let Some(character) = characters.next() {
        match character {
            '(' => depth += 1,
            ')' => depth -= 1,
            '\\' => drop(characters.next()),
            _ => {}
        }
        if depth == 0 {
            return Ok(());
        }
    }
    Err("a comment is not closed".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mailboxes_are_found_in_all_forms() {
        for (text, found) in [
            ("a@b.test", vec!["a@b.test"]),
            ("A B <a@b.test>, c@d.test", vec!["a@b.test", "c@d.test"]),
            ("\"B, A\" <a@b.test>", vec!["a@b.test"]),
            ("a@b.test (Mr (not Mrs) A, B)", vec!["a@b.test"]),
            ("friends: a@b.test, <c@d.test>; e@f.test", vec!["a@b.test", "c@d.test", "e@f.test"]),
            ("undisclosed-recipients:;", vec![]),
            (" , ,", vec![]),
            ("root", vec!["root"]),
            // Nothing of a quoted name is left out, and nobody of a list that is not well formed.
            ("\"a\\ \"@b.test", vec!["\"a\\ \"@b.test"]),
            ("> <a@b.test>", vec!["a@b.test"]),
            ("a @ b.test", vec!["a@b.test"]),
        ] {
            assert_eq!(read_list(text).unwrap(), found, "{text}");
        }
        for bad in ["<a@b.test", "\"a", "(a"] {
            assert!(read_list(bad).is_err(), "{bad}");
        }
    }
}

//! Finds the request that a database query names in a comment. Pure.
//!
//! An application that serves several requests at once puts the id of the request into its queries:
//! `/*nagaya='4bf92f3577b34da6a3ce929d0e0e4736'*/` in the form of sqlcommenter, or with a colon as
//! Rails does. The id came with the request as `X-Request-Id`.
//!
//! Invariant: a text that names two requests names none. A visitor's text may be part of a query.
//! Not here: when a question begins (`turns`).

use memchr::memmem;

/// Name of the tag.
const NAME: &[u8] = b"nagaya";

/// Number of hexadecimal digits of a request's id.
const ID_LEN: usize = 32;

/// Returns the request that these bytes name.
pub fn find_tag(said: &[u8]) -> Option<u128> {
    let mut ids = memmem::find_iter(said, NAME).filter_map(|at| read_id(&said[at + NAME.len()..]));
    let id = ids.next()?;
    ids.all(|other| other == id).then_some(id)
}

/// Reads the text behind the name: `='ID'`, `=ID`, `:'ID'` or `:ID`.
fn read_id(text: &[u8]) -> Option<u128> {
    let value = text.strip_prefix(b"=").or_else(|| text.strip_prefix(b":"))?;
    let value = value.strip_prefix(b"'").unwrap_or(value);
    let (digits, rest) = value.split_at_checked(ID_LEN)?;
    if rest.first().is_some_and(u8::is_ascii_alphanumeric) {
        return None;
    }
    let is_digit = |digit: &u8| matches!(digit, b'0'..=b'9' | b'a'..=b'f');
    let digits = str::from_utf8(digits).ok().filter(|_| digits.iter().all(is_digit))?;
    u128::from_str_radix(digits, 16).ok().filter(|id| *id > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

    #[test]
    fn a_tag_is_read_in_each_of_its_forms() {
        let id = u128::from_str_radix(ID, 16).ok();
        for (query, expected) in [
            (format!("SELECT 1 /*nagaya='{ID}'*/"), id),
            (format!("\x03SELECT 1 /*application='Blog',nagaya='{ID}',x='y'*/"), id),
            (format!("/*nagaya:{ID}*/ SELECT 1"), id),
            (format!("SELECT 'nagaya' /*nagaya={ID}*/"), id),
            (format!("SELECT 1 --nagaya:'{ID}'"), id),
            (format!("nagaya:{ID}"), id),
            (format!("/*nagaya='{ID}'*/ /*nagaya:{ID}*/"), id),
            (format!("/*nagaya='{ID}',nagaya='{}'*/", ID.replace('4', "5")), None),
            (format!("/*nagaya='{ID}0'*/"), None),
            (format!("/*nagaya='{}'*/", ID.to_uppercase()), None),
            (format!("/*nagaya='{}'*/", &ID[1..]), None),
            (format!("/*nagaya='{}'*/", "0".repeat(ID_LEN)), None),
            (format!("/*nagaya '{ID}'*/"), None),
            ("nagaya".into(), None),
            (String::new(), None),
        ] {
            assert_eq!(find_tag(query.as_bytes()), expected, "{query}");
        }
    }
}

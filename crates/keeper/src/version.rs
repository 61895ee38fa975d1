//! Versions as they are compared here: the first two numbers, of the kernel that runs and of
//! programs.
//!
//! Not here: their consequences (`cells::hierarchy`, `image::criu`, `nagaya doctor`).

/// Parses `6.18.5-amd64` as (6, 18). `None` if it does not begin with two numbers.
pub fn of(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().ok());
    Some((numbers.next()??, numbers.next()??))
}

pub fn of_kernel() -> Option<(u32, u32)> {
    of(&rustix::system::uname().release().to_string_lossy())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_is_its_first_two_numbers_and_compares_by_them() {
        assert_eq!(of("6.1.0-40-cloud-amd64"), Some((6, 1)));
        assert_eq!(of("7.0-rc1"), Some((7, 0)));
        assert_eq!(of("4.2"), Some((4, 2)));
        assert!(of("6.18.5") > of("6.7.12") && of("10.0") > of("9.9"));
        for text in ["next", "5", "", ".5", "v4.1"] {
            assert_eq!(of(text), None, "{text}");
        }
        assert!(of_kernel().is_some());
    }
}

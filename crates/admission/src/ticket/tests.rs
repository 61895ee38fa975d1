//! Tickets as they come from clients: whole, altered, forged, cut short, too long, and from other keys.

use proptest::prelude::*;

use super::*;

const OLD: [u8; 32] = [1; 32];
const NEW: [u8; 32] = [2; 32];

fn ticket() -> Ticket {
    Ticket {
        lane: LaneName(*b"lane of the shop"),
        begins: Moment(1_800_000_000_000_000),
        ends: Moment(1_800_000_060_000_000),
        epoch: 7,
        nonce: Nonce(0x0123_4567_89ab_cdef_0123_4567_89ab_cdef),
    }
}

fn any_ticket() -> impl Strategy<Value = Ticket> {
    (any::<[u8; 16]>(), any::<[u64; 2]>(), any::<u32>(), any::<u128>()).prop_map(
        |(lane, [begins, ends], epoch, nonce)| Ticket {
            lane: LaneName(lane),
            begins: Moment(begins),
            ends: Moment(ends),
            epoch,
            nonce: Nonce(nonce),
        },
    )
}

/// The text of these bytes, whatever they are.
fn text(bytes: &[u8; BYTES]) -> String {
    encode(bytes)
}

fn bytes(text: &str) -> [u8; BYTES] {
    decode(text.as_bytes()).expect("it was encoded here")
}

#[test]
fn a_ticket_has_one_text_that_a_url_and_a_cookie_can_carry() {
    let keys = TicketKeyring::new(1, &OLD);
    let text = keys.sign(&ticket());
    assert_eq!(text.len(), TICKET_CHARS);
    assert!(text.bytes().all(|char| char.is_ascii_alphanumeric() || char == b'-' || char == b'_'), "{text}");
    assert_eq!(keys.verify(&text), Ok(ticket()));
    assert_eq!(keys.sign(&ticket()), text, "the same ticket, the same text");
}

#[test]
fn a_text_is_the_base64_that_others_write_too() {
    // Made with Python's hmac and base64 modules from the layout at the top of the file.
    let expected = concat!(
        "AQAAAAFsYW5lIG9mIHRoZSBzaG9wAAZlFyiYgAAABmUXLCwHAAAAAAcBI0VniavN7wEjRWeJq83vp",
        "37owFbk6JkYKAV2AcgI8IcBlkCavbBWLhoGub08kmM"
    );
    assert_eq!(TicketKeyring::new(1, &OLD).sign(&ticket()), expected);
}

#[test]
fn no_bit_of_a_ticket_can_be_altered() {
    let keys = TicketKeyring::new(1, &OLD);
    let whole = bytes(&keys.sign(&ticket()));
    for at in 0..BYTES {
        for bit in 0..8 {
            let mut altered = whole;
            altered[at] ^= 1 << bit;
            let expected = match at {
                0 => TicketError::Version,
                1..5 => TicketError::Key,
                _ => TicketError::Signature,
            };
            assert_eq!(keys.verify(&text(&altered)), Err(expected), "bit {bit} of byte {at}");
        }
    }
}

#[test]
fn no_character_of_a_ticket_can_be_another_one() {
    let keys = TicketKeyring::new(1, &OLD);
    let whole = keys.sign(&ticket());
    for at in 0..TICKET_CHARS {
        for char in (0..=127).map(char::from).filter(|char| *char != char::from(whole.as_bytes()[at])) {
            let mut altered = whole.clone();
            altered.replace_range(at..=at, char.encode_utf8(&mut [0; 4]));
            assert!(keys.verify(&altered).is_err(), "character {at} as {char:?}");
        }
    }
}

#[test]
fn ticket_of_a_wrong_length_is_refused_unread() {
    let keys = TicketKeyring::new(1, &OLD);
    let whole = keys.sign(&ticket());
    for len in 0..TICKET_CHARS {
        assert_eq!(keys.verify(&whole[..len]), Err(TicketError::Length));
    }
    for more in ["=", "A", " ", "\0", &whole, &"A".repeat(1 << 20)] {
        assert_eq!(keys.verify(&format!("{whole}{more}")), Err(TicketError::Length));
        assert_eq!(keys.verify(&format!("{more}{whole}")), Err(TicketError::Length));
    }
}

#[test]
fn a_key_of_another_node_signs_nothing_here() {
    let foreign = TicketKeyring::new(1, &NEW).sign(&ticket());
    assert_eq!(TicketKeyring::new(1, &OLD).verify(&foreign), Err(TicketError::Signature));
    assert_eq!(TicketKeyring::new(2, &OLD).verify(&foreign), Err(TicketError::Key));
}

#[test]
fn a_signature_for_another_purpose_is_none_of_a_ticket() {
    let mut forged = bytes(&TicketKeyring::new(1, &OLD).sign(&ticket()));
    let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, &OLD), &forged[..SIGNED_BYTES]);
    forged[SIGNED_BYTES..].copy_from_slice(tag.as_ref());
    assert_eq!(TicketKeyring::new(1, &OLD).verify(&text(&forged)), Err(TicketError::Signature));
}

#[test]
fn old_keys_verify_and_the_newest_signs() {
    let mut keys = TicketKeyring::new(1, &OLD);
    let old = keys.sign(&ticket());
    keys.rotate(2, &NEW);
    let new = keys.sign(&ticket());
    assert_ne!(old, new);
    assert_eq!(keys.verify(&old), Ok(ticket()));
    assert_eq!(keys.verify(&new), Ok(ticket()));
    assert_eq!(
        TicketKeyring::new(2, &NEW).verify(&old),
        Err(TicketError::Key),
        "a key that is gone verifies nothing"
    );
}

#[test]
fn of_too_many_keys_the_oldest_goes() {
    let mut keys = TicketKeyring::new(0, &OLD);
    let mut texts = vec![keys.sign(&ticket())];
    for id in 1..=KEYS_MAX {
        keys.rotate(id as u32, &[id as u8; 32]);
        texts.push(keys.sign(&ticket()));
    }
    assert_eq!(keys.verify(&texts[0]), Err(TicketError::Key));
    for text in &texts[1..] {
        assert_eq!(keys.verify(text), Ok(ticket()));
    }
}

#[test]
fn a_key_given_again_replaces_itself() {
    let mut keys = TicketKeyring::new(1, &OLD);
    keys.rotate(1, &NEW);
    assert_eq!(keys.sign(&ticket()), TicketKeyring::new(1, &NEW).sign(&ticket()));
    assert_eq!(keys.verify(&TicketKeyring::new(1, &OLD).sign(&ticket())), Err(TicketError::Signature));
}

#[test]
fn keys_do_not_show_in_a_log() {
    let mut keys = TicketKeyring::new(1, &[0xab; 32]);
    keys.rotate(77, &[0xcd; 32]);
    assert_eq!(format!("{keys:?}"), "[1, 77]");
}

proptest! {
    #[test]
    fn every_ticket_comes_back_as_it_was(ticket in any_ticket(), id: u32, key: [u8; 32]) {
        let keys = TicketKeyring::new(id, &key);
        prop_assert_eq!(keys.verify(&keys.sign(&ticket)), Ok(ticket));
    }

    #[test]
    fn nothing_that_is_no_ticket_passes_or_panics(text in "\\PC*") {
        prop_assert!(TicketKeyring::new(1, &OLD).verify(&text).is_err());
    }

    #[test]
    fn nothing_of_the_right_length_passes_or_panics(text in "[A-Za-z0-9_-]{119}") {
        prop_assert!(TicketKeyring::new(1, &OLD).verify(&text).is_err());
    }

    #[test]
    fn characters_of_several_bytes_do_no_harm(text in "[A-Za-z0-9_-]{0,60}[é世]{1,40}[A-Za-z0-9_-]{0,60}") {
        prop_assert!(TicketKeyring::new(1, &OLD).verify(&text).is_err());
    }

    /// Random bytes behind a good header come as far as the signature.
    #[test]
    fn no_tag_is_guessed(mut forged in prop::array::uniform32(any::<u8>()), ticket in any_ticket()) {
        let keys = TicketKeyring::new(1, &OLD);
        let mut whole = bytes(&keys.sign(&ticket));
        forged[0] ^= u8::from(forged == whole[SIGNED_BYTES..]);
        whole[SIGNED_BYTES..].copy_from_slice(&forged);
        prop_assert_eq!(keys.verify(&text(&whole)), Err(TicketError::Signature));
    }

    /// Mutations of a ticket: pieces cut, doubled, swapped. Only the ticket itself passes.
    #[test]
    fn mutations_of_a_ticket_neither_pass_nor_panic(
        ticket in any_ticket(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), 0..4u8), 1..6),
    ) {
        let keys = TicketKeyring::new(1, &OLD);
        let whole = keys.sign(&ticket);
        let mut chars: Vec<u8> = whole.bytes().collect();
        for (a, b, edit) in edits {
            if chars.is_empty() {
                break;
            }
            let a = a.index(chars.len());
            let b = b.index(chars.len());
            match edit {
                0 => chars.swap(a, b),
                1 => drop(chars.remove(a)),
                2 => chars.insert(a, chars[b]),
                _ => chars[a] = chars[a].wrapping_add(1) & 127,
            }
        }
        let mutated = String::from_utf8(chars).expect("it is ASCII");
        prop_assert_eq!(keys.verify(&mutated).is_ok(), mutated == whole);
    }
}

#[test]
fn a_text_for_one_purpose_is_none_for_another() {
    let keys = TicketKeyring::new(1, &[1; 32]);
    let ticket = ticket();
    let as_ticket = keys.sign(&ticket);
    let as_visit = keys.sign_for(SigningPurpose::Visit, &ticket);
    assert_eq!(keys.verify_for(SigningPurpose::Visit, &as_visit), Ok(ticket));
    assert_eq!(keys.verify(&as_visit), Err(TicketError::Signature));
    assert_eq!(keys.verify_for(SigningPurpose::Visit, &as_ticket), Err(TicketError::Signature));
}

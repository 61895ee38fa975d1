//! The stream of an image between two keepers, sealed so that its carrier can neither read nor
//! change it.
//!
//! ```text
//! <salt: 32 bytes> <piece + tag> <piece + tag> ...
//! ```
//!
//! AES-256-GCM (RFC 5116), in pieces of `PIECE_LEN` bytes except for the last. The key is made for
//! this one stream from the cluster's key, the salt, the order, and the terms (`StreamTerms`). So a
//! stream of another order, image or position does not open. Its pieces open in their order only:
//! the nonce is their number. Its end is known before it begins.
//!
//! Not here: orders and keys (`order`), the archive inside (`archive`), pipes (`incoming`,
//! `outgoing`).

use std::io;

use ring::aead::{Aad, LessSafeKey, NONCE_LEN, Nonce};
use rustix::rand::{GetRandomFlags, getrandom};

use crate::image::Digest;
use crate::image::transfer::order::TransferOrder;

/// Number of bytes of the archive that are sealed at once.
pub const PIECE_LEN: usize = 64 * 1024;

/// Length of the salt that makes each stream's key different, bytes.
pub const SALT_LEN: usize = 32;

/// Length of the tag after each piece, bytes.
pub const TAG_LEN: usize = 16;

/// The terms that both ends have agreed on.
#[derive(Debug, Clone, Copy)]
pub struct StreamTerms {
    /// Digest of the archive.
    pub digest: Digest,
    /// Length of the archive.
    pub bytes: u64,
    /// The archive's first byte that is sent.
    pub offset: u64,
}

impl StreamTerms {
    /// Returns the length of the sealed stream. 0 if nothing is missing.
    pub fn sealed_bytes(&self) -> u64 {
        let left = self.bytes.saturating_sub(self.offset);
        let pieces = left.div_ceil(PIECE_LEN as u64);
        let salt = if left == 0 { 0 } else { SALT_LEN as u64 };
        left.saturating_add(pieces.saturating_mul(TAG_LEN as u64)).saturating_add(salt)
    }

    fn key(&self, order: &TransferOrder, salt: &[u8; SALT_LEN]) -> LessSafeKey {
        order.key.seals_stream(&[
            salt,
            order.text.as_bytes(),
            self.digest.to_string().as_bytes(),
            &self.bytes.to_le_bytes(),
            &self.offset.to_le_bytes(),
        ])
    }
}

/// Numbers pieces. No number is used twice with one key.
#[derive(Debug, Default)]
struct NonceCounter(u64);

impl NonceCounter {
    fn next(&mut self) -> Nonce {
        let mut nonce = [0; NONCE_LEN];
        nonce[..8].copy_from_slice(&self.0.to_le_bytes());
        self.0 += 1;
        Nonce::assume_unique_for_key(nonce)
    }
}

/// Seals pushed bytes, and sends them in pieces.
pub struct StreamSealer<W> {
    key: LessSafeKey,
    counter: NonceCounter,
    piece: Vec<u8>,
    send: W,
}

impl<W: FnMut(&[u8]) -> io::Result<()>> StreamSealer<W> {
    /// Begins a stream, and sends its salt at once.
    pub fn new(order: &TransferOrder, terms: &StreamTerms, mut send: W) -> io::Result<Self> {
        let mut salt = [0; SALT_LEN];
        getrandom(&mut salt, GetRandomFlags::empty())?;
        send(&salt)?;
        let piece = Vec::with_capacity(PIECE_LEN + TAG_LEN);
        Ok(Self { key: terms.key(order, &salt), counter: NonceCounter::default(), piece, send })
    }

    pub fn push(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(PIECE_LEN - self.piece.len()));
            self.piece.extend_from_slice(now);
            bytes = later;
            if self.piece.len() == PIECE_LEN {
                self.flush()?;
            }
        }
        Ok(())
    }

    /// Sends the last piece.
    pub fn finish(mut self) -> io::Result<()> {
        if self.piece.is_empty() { Ok(()) } else { self.flush() }
    }

    fn flush(&mut self) -> io::Result<()> {
        let nonce = self.counter.next();
        let sealed = self.key.seal_in_place_append_tag(nonce, Aad::empty(), &mut self.piece);
        sealed.map_err(|_| io::Error::other("a piece of an image cannot be sealed"))?;
        (self.send)(&self.piece)?;
        self.piece.clear();
        Ok(())
    }
}

/// Opens the pieces of one stream, in their order.
pub struct StreamOpener {
    key: LessSafeKey,
    counter: NonceCounter,
}

impl StreamOpener {
    pub fn new(order: &TransferOrder, terms: &StreamTerms, salt: &[u8; SALT_LEN]) -> Self {
        Self { key: terms.key(order, salt), counter: NonceCounter::default() }
    }

    /// Returns the bytes of the archive in a piece with its tag. `None` if the other keeper has not
    /// sealed it.
    pub fn open<'a>(&mut self, piece: &'a mut [u8]) -> Option<&'a [u8]> {
        let nonce = self.counter.next();
        self.key.open_in_place(nonce, Aad::empty(), piece).ok().map(|opened| &*opened)
    }
}

#[cfg(test)]
mod tests {
    use nagaya_records::{NodeName, SiteName};
    use proptest::prelude::*;

    use super::*;
    use crate::image::transfer::order::{ClusterKey, KEY_LEN, TransferEnd, give_order, verify_order};

    fn order() -> TransferOrder {
        let (key, site) = (ClusterKey::new([3; KEY_LEN]), SiteName::new("shop").unwrap());
        let [a, b] = ["a", "b"].map(|name| NodeName::new(name).unwrap());
        let text = give_order(&key, &site, &a, &b).unwrap();
        verify_order(&text, &[key], Some("a"), &site, TransferEnd::Giver).unwrap()
    }

    fn terms(bytes: u64, offset: u64) -> StreamTerms {
        StreamTerms { digest: Digest::of(&[b"image"]), bytes, offset }
    }

    fn seal(order: &TransferOrder, terms: &StreamTerms, content: &[u8], cut: usize) -> Vec<u8> {
        let mut sent = Vec::new();
        let mut sealer = StreamSealer::new(order, terms, |bytes: &[u8]| {
            sent.extend_from_slice(bytes);
            Ok(())
        })
        .unwrap();
        content.chunks(cut).for_each(|piece| sealer.push(piece).unwrap());
        sealer.finish().unwrap();
        sent
    }

    fn open(order: &TransferOrder, terms: &StreamTerms, sealed: &[u8]) -> Option<Vec<u8>> {
        let (salt, pieces) = sealed.split_first_chunk::<SALT_LEN>()?;
        let mut opener = StreamOpener::new(order, terms, salt);
        let mut content = Vec::new();
        for piece in pieces.chunks(PIECE_LEN + TAG_LEN) {
            content.extend_from_slice(opener.open(&mut piece.to_vec())?);
        }
        Some(content)
    }

    fn content(len: usize) -> Vec<u8> {
        (0..len).map(|at| u8::try_from(at * 7 % 251).unwrap()).collect()
    }

    #[test]
    fn a_stream_opens_for_the_same_order_and_terms_only() {
        assert_eq!(ring::aead::AES_256_GCM.tag_len(), TAG_LEN);
        let (order, content) = (order(), content(PIECE_LEN + 1));
        let terms = terms(content.len() as u64 + 5, 5);
        let sealed = seal(&order, &terms, &content, 1000);
        assert_eq!(sealed.len() as u64, terms.sealed_bytes());
        assert_eq!(open(&order, &terms, &sealed), Some(content));
        let other_order = self::order();
        assert_eq!(open(&other_order, &terms, &sealed), None, "of another order");
        for other in [
            StreamTerms { offset: 6, ..terms },
            StreamTerms { bytes: terms.bytes + 1, ..terms },
            StreamTerms { digest: Digest::of(&[b"other"]), ..terms },
        ] {
            assert_eq!(open(&order, &other, &sealed), None, "{other:?}");
        }
    }

    #[test]
    fn no_content_shows_and_no_change_passes() {
        let (order, content) = (order(), b"s3cr3t ".repeat(20_000));
        let terms = terms(content.len() as u64, 0);
        let sealed = seal(&order, &terms, &content, PIECE_LEN);
        assert!(!sealed.windows(6).any(|part| part == b"s3cr3t"));
        let again = seal(&order, &terms, &content, PIECE_LEN);
        assert_ne!(sealed, again, "each stream has a key of its own");
        for at in [0, SALT_LEN, SALT_LEN + PIECE_LEN, sealed.len() - 1] {
            let mut bad = sealed.clone();
            bad[at] ^= 1;
            assert_eq!(open(&order, &terms, &bad), None, "at {at}");
        }
        let (salt, pieces) = sealed.split_at(SALT_LEN);
        let (first, rest) = pieces.split_at(PIECE_LEN + TAG_LEN);
        let (second, third) = rest.split_at(PIECE_LEN + TAG_LEN);
        let swapped = [salt, second, first, third].concat();
        assert_eq!(open(&order, &terms, &swapped), None, "in another order");
    }

    #[test]
    fn nothing_is_sent_of_what_is_there() {
        assert_eq!(terms(100, 100).sealed_bytes(), 0);
        assert_eq!(terms(100, 200).sealed_bytes(), 0);
        assert_eq!(terms(100, 99).sealed_bytes(), (SALT_LEN + 1 + TAG_LEN) as u64);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn a_stream_has_as_many_bytes_as_was_said(len in 1..3 * PIECE_LEN, cut in 1..2 * PIECE_LEN) {
            let (order, content) = (order(), content(len));
            let terms = terms(len as u64, 0);
            let sealed = seal(&order, &terms, &content, cut);
            prop_assert_eq!(sealed.len() as u64, terms.sealed_bytes());
            prop_assert_eq!(open(&order, &terms, &sealed), Some(content));
        }
    }
}

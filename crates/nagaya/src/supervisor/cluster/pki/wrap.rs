//! Wraps a key for one member: HPKE in base mode (RFC 9180) with DHKEM(X25519, HKDF-SHA256),
//! HKDF-SHA256 and ChaCha20Poly1305.
//!
//! Base mode does not authenticate the sender: authenticators do (`pki`).

use hpke::aead::ChaCha20Poly1305;
use hpke::kdf::HkdfSha256;
use hpke::kem::X25519HkdfSha256;
use hpke::{Deserializable, Kem, OpModeR, OpModeS, Serializable, setup_receiver, setup_sender};
use serde::{Deserialize, Serialize};

use super::{KEY_LEN, from_hex, to_hex};

/// Bytes of an encapsulated key of X25519.
const ENCAPPED_LEN: usize = 32;

type Private = <X25519HkdfSha256 as Kem>::PrivateKey;
type Public = <X25519HkdfSha256 as Kem>::PublicKey;
type Encapped = <X25519HkdfSha256 as Kem>::EncappedKey;

/// A node's own key pair. Its private half never leaves the node.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WrapIdentity {
    /// Both hexadecimal.
    private: String,
    public: String,
}

impl WrapIdentity {
    pub fn generate() -> Self {
        let (private, public) = X25519HkdfSha256::gen_keypair();
        Self { private: to_hex(&private.to_bytes()), public: to_hex(&public.to_bytes()) }
    }

    pub fn public(&self) -> String {
        self.public.clone()
    }

    /// Unwraps a key. `None` if it was wrapped for another member, or for another purpose.
    pub fn unwrap(&self, wrapped: &str, info: &[u8]) -> Option<[u8; KEY_LEN]> {
        let private = Private::from_bytes(&from_hex(&self.private)?).ok()?;
        let bytes = from_hex(wrapped)?;
        let (encapped, sealed) = bytes.split_at_checked(ENCAPPED_LEN)?;
        let encapped = Encapped::from_bytes(encapped).ok()?;
        let mut context = setup_receiver::<ChaCha20Poly1305, HkdfSha256, X25519HkdfSha256>(
            &OpModeR::Base,
            &private,
            &encapped,
            info,
        )
        .ok()?;
        context.open(sealed, b"").ok()?.try_into().ok()
    }
}

/// Wraps a key. `None` if `public` is not a valid public key.
pub fn wrap(public: &str, key: &[u8; KEY_LEN], info: &[u8]) -> Option<String> {
    let public = Public::from_bytes(&from_hex(public)?).ok()?;
    let (encapped, mut context) =
        setup_sender::<ChaCha20Poly1305, HkdfSha256, X25519HkdfSha256>(&OpModeS::Base, &public, info).ok()?;
    let sealed = context.seal(key, b"").ok()?;
    Some(to_hex(&encapped.to_bytes()) + &to_hex(&sealed))
}

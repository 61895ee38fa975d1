//! Provides the algorithms of TLS, for visitors and between nodes: ring, and a key exchange that
//! resists future quantum computers.
//!
//! X25519MLKEM768 (draft-ietf-tls-ecdhe-mlkem) joins the secrets of X25519 and ML-KEM-768 (FIPS
//! 203). It is as strong as the stronger of both, so a fault in ML-KEM makes nothing weaker than
//! X25519. Not here: certificates and their keys, which only ring handles.

use std::sync::LazyLock;

use ml_kem::kem::{Decapsulate as _, Encapsulate as _, Kem as _, KeyExport as _};
use ml_kem::{DecapsulationKey, EncapsulationKey, MlKem768};
use rustls::crypto::ring::kx_group::X25519;
use rustls::crypto::{
    ActiveKeyExchange, CompletedKeyExchange, CryptoProvider, SharedSecret, SupportedKxGroup, ring,
};
use rustls::ffdhe_groups::FfdheGroup;
use rustls::{Error, NamedGroup, PeerMisbehaved, ProtocolVersion};

/// Length of an encapsulation key of ML-KEM-768, bytes. `CIPHERTEXT_LEN` is that of a ciphertext
/// (FIPS 203, table 3). They precede X25519's share.
const KEY_LEN: usize = 1184;
const CIPHERTEXT_LEN: usize = 1088;

const INVALID_SHARE: Error = Error::PeerMisbehaved(PeerMisbehaved::InvalidKeyShare);

static PROVIDER: LazyLock<CryptoProvider> = LazyLock::new(|| {
    let mut provider = ring::default_provider();
    provider.kx_groups.insert(0, &X25519MlKem768);
    provider
});

/// Returns the algorithms of all TLS connections of the edge.
pub fn provider() -> CryptoProvider {
    PROVIDER.clone()
}

/// The hybrid key exchange. Peers that do not know it get one of ring's.
#[derive(Debug)]
struct X25519MlKem768;

impl SupportedKxGroup for X25519MlKem768 {
    fn start(&self) -> Result<Box<dyn ActiveKeyExchange>, Error> {
        let classical = X25519.start()?;
        let (secret_key, public_key) = MlKem768::generate_keypair();
        let share = [&public_key.to_bytes()[..], classical.pub_key()].concat();
        Ok(Box::new(StartedExchange { classical, secret_key, share }))
    }

    fn start_and_complete(&self, client_share: &[u8]) -> Result<CompletedKeyExchange, Error> {
        let (key, classical_share) = client_share.split_at_checked(KEY_LEN).ok_or(INVALID_SHARE)?;
        let key = key.try_into().map_err(|_| INVALID_SHARE)?;
        // Refuses invalid keys: FIPS 203 section 7.2.
        let key = EncapsulationKey::<MlKem768>::new(key).map_err(|_| INVALID_SHARE)?;
        let classical = X25519.start_and_complete(classical_share)?;
        let (ciphertext, secret) = key.encapsulate();
        Ok(CompletedKeyExchange {
            group: self.name(),
            pub_key: [&ciphertext[..], &classical.pub_key].concat(),
            secret: join_secrets(&secret, &classical.secret),
        })
    }

    fn ffdhe_group(&self) -> Option<FfdheGroup<'static>> {
        None
    }

    fn name(&self) -> NamedGroup {
        NamedGroup::X25519MLKEM768
    }

    fn usable_for_version(&self, version: ProtocolVersion) -> bool {
        version == ProtocolVersion::TLSv1_3
    }
}

/// A client's side, before the server has responded.
struct StartedExchange {
    classical: Box<dyn ActiveKeyExchange>,
    secret_key: DecapsulationKey<MlKem768>,
    share: Vec<u8>,
}

impl ActiveKeyExchange for StartedExchange {
    fn complete(self: Box<Self>, server_share: &[u8]) -> Result<SharedSecret, Error> {
        let (ciphertext, classical_share) =
            server_share.split_at_checked(CIPHERTEXT_LEN).ok_or(INVALID_SHARE)?;
        let ciphertext = ciphertext.try_into().map_err(|_| INVALID_SHARE)?;
        let secret = self.secret_key.decapsulate(ciphertext);
        Ok(join_secrets(&secret, &self.classical.complete(classical_share)?))
    }

    /// Offers X25519's share by itself, too: a server without ML-KEM needs no second round trip.
    fn hybrid_component(&self) -> Option<(NamedGroup, &[u8])> {
        Some((self.classical.group(), self.classical.pub_key()))
    }

    fn complete_hybrid_component(self: Box<Self>, server_share: &[u8]) -> Result<SharedSecret, Error> {
        self.classical.complete(server_share)
    }

    fn pub_key(&self) -> &[u8] {
        &self.share
    }

    fn ffdhe_group(&self) -> Option<FfdheGroup<'static>> {
        None
    }

    fn group(&self) -> NamedGroup {
        NamedGroup::X25519MLKEM768
    }
}

/// Joins the secrets. ML-KEM's comes first, as its share does.
fn join_secrets(post_quantum: &[u8], classical: &SharedSecret) -> SharedSecret {
    SharedSecret::from([post_quantum, classical.secret_bytes()].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(exchange: &CompletedKeyExchange) -> Vec<u8> {
        exchange.secret.secret_bytes().to_vec()
    }

    #[test]
    fn both_sides_have_one_secret_of_both_parts() {
        let client = X25519MlKem768.start().unwrap();
        assert_eq!(client.pub_key().len(), 1184 + 32);
        let server = X25519MlKem768.start_and_complete(client.pub_key()).unwrap();
        assert_eq!((server.group, server.pub_key.len()), (NamedGroup::X25519MLKEM768, 1088 + 32));
        let joined = secret(&server);
        assert_eq!(joined.len(), 32 + 32);
        assert_eq!(client.complete(&server.pub_key).unwrap().secret_bytes(), joined);
    }

    #[test]
    fn x25519_alone_can_be_chosen() {
        let client = X25519MlKem768.start().unwrap();
        let (group, share) = client.hybrid_component().unwrap();
        assert_eq!(group, NamedGroup::X25519);
        let server = X25519.start_and_complete(share).unwrap();
        let shared = client.complete_hybrid_component(&server.pub_key).unwrap();
        assert_eq!(shared.secret_bytes(), secret(&server));
    }

    #[test]
    fn shares_that_are_none_are_refused() {
        let client = X25519MlKem768.start().unwrap();
        let share = client.pub_key().to_vec();
        for length in [0, 32, 1183, 1184, 1215] {
            assert!(X25519MlKem768.start_and_complete(&share[..length]).is_err(), "{length}");
        }
        assert!(X25519MlKem768.start_and_complete(&[&share[..], &[0]].concat()).is_err());
        // Coefficients that are not below q: FIPS 203 section 7.2.
        let overflowing = [&[0xff; 1184][..], &share[1184..]].concat();
        assert!(X25519MlKem768.start_and_complete(&overflowing).is_err());
        // A point of small order gives a secret that everybody knows: RFC 8446 section 7.4.2.
        let small = [&share[..1184], &[0; 32]].concat();
        assert!(X25519MlKem768.start_and_complete(&small).is_err());
        let server = X25519MlKem768.start_and_complete(&share).unwrap();
        assert!(client.complete(&server.pub_key[..1100]).is_err());
    }

    /// One with an altered ciphertext ends in a handshake that fails, as a secret that differs (FIPS 203 section 6.3).
    #[test]
    fn an_altered_ciphertext_gives_another_secret() {
        let client = X25519MlKem768.start().unwrap();
        let server = X25519MlKem768.start_and_complete(client.pub_key()).unwrap();
        let mut altered = server.pub_key.clone();
        altered[7] ^= 1;
        assert_ne!(client.complete(&altered).unwrap().secret_bytes(), secret(&server));
    }
}

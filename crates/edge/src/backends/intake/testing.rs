//! Bodies for tests.

use http_body_util::{BodyExt, Full};

use super::*;
use crate::spool::testing::spool;

/// A body as it is after all of it was taken in.
pub async fn kept(body: impl Into<Bytes>) -> RequestBody {
    let (spool, _directory) = spool(64 << 20, 64 << 20);
    let arriving = RequestBody::new(Full::new(body.into()).map_err(|never| match never {}));
    let tenant = TenantName::new("alice").expect("it is a name");
    keep(&spool, &tenant, arriving).await.expect("there is room").0
}

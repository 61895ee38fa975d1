//! `KVS`: settings of nagaya's store, by key. They come from memory. A rule with one look-up stays
//! one line for any number of hosts.
//!
//! Not here: where settings are kept (`store`), how they reach an evaluation (`facts`).

use std::borrow::Cow;

use crate::facts::ScalarValue;
use crate::native::{NativeArg, NativeCall, NativeError, NativeMethod, NativeValue};

pub const NATIVES: &[NativeMethod] =
    &[NativeMethod::singleton("KVS", "get", get), NativeMethod::singleton("KVS", "[]", get)];

/// `KVS.get(key)`, `KVS.get(key, field)`. A key of nil, such as the host of a request without one,
/// has no setting.
fn get<'a>(call: &mut NativeCall<'a>) -> Result<NativeValue<'a>, NativeError> {
    call.expect(1, 2)?;
    if *call.any(0) == NativeArg::Nil {
        return Ok(NativeValue::Nil);
    }
    let key = call.text(0)?;
    if call.args().len() == 2 {
        let field = call.word(1)?;
        return Ok(one(call, key, Some(field)).into());
    }
    let mut plain = None;
    let mut fields = Vec::new();
    let found = call.facts.setting(key, &mut |field, scalar| match field {
        None => plain = Some(value(scalar)),
        Some(field) => fields.push((Cow::Owned(field.to_owned()), value(scalar))),
    });
    Ok(match plain {
        Some(plain) => plain,
        None if found => NativeValue::Map(fields),
        None => NativeValue::Nil,
    })
}

fn one<'a>(call: &NativeCall<'a>, key: &str, wanted: Option<&str>) -> Option<NativeValue<'a>> {
    let mut found = None;
    call.facts.setting(key, &mut |field, scalar| {
        if field == wanted {
            found = Some(value(scalar));
        }
    });
    found
}

fn value<'a>(scalar: ScalarValue<'_>) -> NativeValue<'a> {
    match scalar {
        ScalarValue::Bool(value) => NativeValue::Bool(value),
        ScalarValue::Int(value) => NativeValue::Int(value),
        ScalarValue::Float(value) => NativeValue::Float(value),
        ScalarValue::Text(value) => NativeValue::from(value.to_owned()),
    }
}

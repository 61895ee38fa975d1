//! `KVS`: settings of nagaya's store, by key. They come from memory; a rule with one look-up stays one line for any
//! number of hosts.
//!
//! Not here: where settings are kept (`cmdb`), how they reach an evaluation (`facts`).

use std::borrow::Cow;

use crate::facts::Scalar;
use crate::native::{Arg, Call, Native, NativeError, Value};

pub const NATIVES: &[Native] = &[Native::singleton("KVS", "get", get), Native::singleton("KVS", "[]", get)];

/// `KVS.get(key)`, `KVS.get(key, field)`. A key of nil, such as the host of a request without one, has no setting.
fn get<'a>(call: &mut Call<'a>) -> Result<Value<'a>, NativeError> {
    call.expect(1, 2)?;
    if *call.any(0) == Arg::Nil {
        return Ok(Value::Nil);
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
        None if found => Value::Map(fields),
        None => Value::Nil,
    })
}

fn one<'a>(call: &Call<'a>, key: &str, wanted: Option<&str>) -> Option<Value<'a>> {
    let mut found = None;
    call.facts.setting(key, &mut |field, scalar| {
        if field == wanted {
            found = Some(value(scalar));
        }
    });
    found
}

fn value<'a>(scalar: Scalar<'_>) -> Value<'a> {
    match scalar {
        Scalar::Bool(value) => Value::Bool(value),
        Scalar::Int(value) => Value::Int(value),
        Scalar::Float(value) => Value::Float(value),
        Scalar::Text(value) => Value::from(value.to_owned()),
    }
}

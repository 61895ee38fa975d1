import { randomBytes } from 'crypto';
import { field } from '../../lib/settings';

export default function login(request, response) {
  const id = randomBytes(16).toString('hex');
  field().sessions.set(id, request.body.name);
  response.setHeader('Set-Cookie', `session=${id}; Path=/; HttpOnly`);
  response.send('logged in');
}
